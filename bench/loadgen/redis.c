/* Redis's replies (RESP 2), one per command of a request; pages are replies to XRANGE. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "loadgen.h"

/* A page is an array of entries, each flattened into five values: the pair, its id, the fields, a name, a payload. */
enum { ID_OF_ENTRY = 1, VALUES_OF_ENTRY = 5 };

/* `(time-sequence`, exclusive, with a fixed width so that it can replace the previous one. */
static void after(const char *id, struct answer *answer) {
    unsigned long long ms = 0, sequence = 0;
    sscanf(id, "%llu-%llu", &ms, &sequence);
    snprintf(answer->next, sizeof answer->next, "(%015llu-%015llu", ms, sequence);
}

static size_t take(struct buffer *in, struct reading *r, long replies, struct answer *answer) {
    /* `state` is 1 while a reply is being parsed, `expected` the number of its remaining values. */
    while (r->replies < replies) {
        char *begin = in->at + r->at;
        char *end = memmem(begin, in->used - r->at, "\r\n", 2);
        if (!end) return 0;
        size_t line = (size_t)(end + 2 - begin);
        long n = atol(begin + 1);
        if (!r->state) {
            r->state = 1;
            r->expected = 1;
        }
        if (*begin == '$' && n >= 0) {
            if (in->used - r->at < line + (size_t)n + 2) return 0;
            line += (size_t)n + 2;
        }
        if (*begin == '-') r->values = -1;
        r->expected--;
        if (*begin == '*' && n > 0) r->expected += n;
        r->at += line;
        if (!r->expected) {
            r->replies++;
            r->state = 0;
        }
    }
    answer->status = r->values < 0 ? 500 : 200;
    if (counting && answer->status == 200 && *in->at == '*') {
        answer->messages = atol(in->at + 1);
        /* The last id: walk the values again, from the first after the array's head. */
        const char *p = (char *)memmem(in->at, in->used, "\r\n", 2) + 2, *id = NULL;
        for (long i = 0; i < answer->messages * VALUES_OF_ENTRY; i++) {
            const char *value = (char *)memmem(p, (size_t)(in->at + r->at - p), "\r\n", 2) + 2;
            if (*p == '$') {
                if (i % VALUES_OF_ENTRY == ID_OF_ENTRY) id = value;
                value += atol(p + 1) + 2;
            }
            p = value;
        }
        if (id) after(id, answer);
    }
    return r->at;
}

const struct protocol redis = {"redis", take, 32};
