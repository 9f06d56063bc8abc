/* Kafka's responses: Produce 7 and Fetch 4, each with one topic and one partition. */
#include <string.h>

#include "loadgen.h"

enum { SIZE = 4, CORRELATION = 4, COUNT = 4, THROTTLE = 4, INDEX = 4, ERROR = 2 };

static int error_at(const char *p) { return (short)((unsigned char)p[0] << 8 | (unsigned char)p[1]); }

static void page(const char *p, const char *end, struct answer *answer) {
    enum { BATCH_HEAD = 12, LAST_OFFSET = 23, RECORDS = 57, WHOLE_HEAD = 61 };
    while (end - p >= WHOLE_HEAD) {
        size_t size = BATCH_HEAD + be32(p + 8);
        if ((size_t)(end - p) < size) return; /* truncated at the limit in bytes: it is sent again */
        uint64_t next = be64(p) + be32(p + LAST_OFFSET) + 1;
        answer->messages += be32(p + RECORDS);
        for (int i = 0; i < 8; i++) answer->next[i] = (char)(next >> (56 - 8 * i));
        p += size;
    }
}

static size_t take(struct buffer *in, struct reading *r, long replies, struct answer *answer) {
    (void)r;
    (void)replies;
    if (in->used < SIZE) return 0;
    size_t size = SIZE + be32(in->at);
    if (in->used < size) return 0;
    const char *p = in->at + SIZE + CORRELATION + (counting ? THROTTLE : 0) + COUNT;
    p += 2 + error_at(p) + COUNT + INDEX; /* the topic's name, with a length of two bytes */
    int error = error_at(p);
    answer->status = error ? 500 + error : 200;
    if (counting && !error) {
        const char *records = p + ERROR + 8 + 8; /* high watermark, last stable offset */
        long aborted = (int)be32(records);
        records += COUNT + (aborted > 0 ? aborted * 16 : 0);
        page(records + 4, records + 4 + be32(records), answer);
    }
    return size;
}

const struct protocol kafka = {"kafka", take, 8};
