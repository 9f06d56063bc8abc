/* NATS: acknowledgements of a request, or a consumer's page, arrive as messages in this connection's inbox. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

static size_t take(struct buffer *in, struct reading *r, long replies, struct answer *answer) {
    while (r->replies < replies) {
        char *begin = in->at + r->at;
        char *end = memmem(begin, in->used - r->at, "\r\n", 2);
        if (!end) return 0;
        size_t line = (size_t)(end + 2 - begin);
        int with_headers = !strncmp(begin, "HMSG ", 5);
        if (with_headers || !strncmp(begin, "MSG ", 4)) {
            char *last = end;
            while (last[-1] != ' ') last--;
            size_t size = strtoul(last, NULL, 10);
            if (in->used - r->at < line + size + 2) return 0;
            const char *payload = begin + line;
            r->at += line + size + 2;
            if (with_headers && !strncmp(payload, "NATS/1.0 ", 9) && payload[9] == '4') {
                /* The consumer has no more messages now (or, with 503, the subject has no responder). */
                r->replies = replies;
                break;
            }
            if ((with_headers && !strncmp(payload, "NATS/1.0 503", 12)) || (!counting && memmem(payload, size, "\"error\"", 7)))
                r->values = -1;
            r->expected++;
            r->replies++;
        } else {
            if (*begin == '-') r->values = -1;
            /* The reply to the hello's PING; other lines (INFO, +OK) are no replies. */
            if (!strncmp(begin, "PONG", 4)) r->replies++;
            r->at += line;
        }
    }
    answer->status = r->values < 0 ? 500 : 200;
    if (counting) answer->messages = r->expected;
    return r->at;
}

const struct protocol nats = {"nats", take, 0};
