/* HTTP/1.1 responses with a length or in chunks; they contain a page in Avro if messages are counted. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "loadgen.h"

enum { HEAD, BODY, CHUNK_SIZE, CHUNK };

static const char *avro_long(const char *p, const char *end, long *value) {
    uint64_t n = 0;
    int shift = 0;
    while (p < end && shift < 64) {
        unsigned char c = (unsigned char)*p++;
        n |= (uint64_t)(c & 0x7f) << shift;
        if (!(c & 0x80)) {
            *value = (long)(n >> 1) ^ -(long)(n & 1);
            return p;
        }
        shift += 7;
    }
    refuse("the page ends before its end");
}

/* An array of records: an id (20 bytes, saved as the next position) and a payload. */
static void page(const char *p, const char *end, struct answer *answer) {
    for (;;) {
        long count, size;
        p = avro_long(p, end, &count);
        if (count == 0) return;
        if (count < 0) {
            count = -count;
            p = avro_long(p, end, &size);
        }
        for (long i = 0; i < count; i++) {
            p = avro_long(p, end, &size);
            if (size != 20 || end - p < 20) refuse("a message id of %ld bytes", size);
            memcpy(answer->next, p, 20);
            p = avro_long(p + 20, end, &size);
            if (size < 0 || end - p < size) refuse("the page ends before its end");
            p += size;
        }
        answer->messages += count;
    }
}

/* Chunks are joined in place: the body then directly follows the head. */
static size_t joined(char *body, size_t size) {
    size_t from = 0, to = 0;
    while (from < size) {
        char *line = memmem(body + from, size - from, "\r\n", 2);
        size_t chunk = strtoul(body + from, NULL, 16);
        if (!chunk) return to;
        from = (size_t)(line - body) + 2;
        memmove(body + to, body + from, chunk);
        to += chunk;
        from += chunk + 2;
    }
    return to;
}

static size_t take(struct buffer *in, struct reading *r, long replies, struct answer *answer) {
    (void)replies;
    for (;;) {
        char *begin = in->at + r->at, *end;
        size_t left = in->used - r->at;
        switch (r->state) {
        case HEAD:
            end = memmem(in->at, in->used, "\r\n\r\n", 4);
            if (!end) return 0;
            r->at = (size_t)(end + 4 - in->at);
            r->values = (long)r->at;
            r->state = BODY;
            for (char *line = in->at; line < end; line = (char *)memmem(line, (size_t)(end + 2 - line), "\r\n", 2) + 2) {
                if (!strncasecmp(line, "content-length:", 15)) r->expected = atol(line + 15);
                if (!strncasecmp(line, "transfer-encoding:", 18)) r->state = CHUNK_SIZE;
            }
            break;
        case BODY:
            if (left < (size_t)r->expected) return 0;
            r->at += (size_t)r->expected;
            goto complete;
        case CHUNK_SIZE:
            end = memmem(begin, left, "\r\n", 2);
            if (!end) return 0;
            r->expected = strtol(begin, NULL, 16);
            r->at = (size_t)(end + 2 - in->at);
            r->state = CHUNK;
            break;
        case CHUNK:
            if (left < (size_t)r->expected + 2) return 0;
            r->at += (size_t)r->expected + 2;
            if (!r->expected) goto complete;
            r->state = CHUNK_SIZE;
        }
    }
complete:
    answer->status = atoi(in->at + 9);
    if (counting && answer->status == 200) {
        char *body = in->at + r->values;
        size_t size = r->at - (size_t)r->values;
        if (r->state == CHUNK) size = joined(body, size);
        page(body, body + size, answer);
    }
    return r->at;
}

const struct protocol http = {"http", take, 20};
