/* PostgreSQL's messages (protocol 3): a request ends with one ReadyForQuery for each Sync or Query in it. Rows have the
 * id as their first column, in binary. */
#include <string.h>

#include "loadgen.h"

static size_t take(struct buffer *in, struct reading *r, long replies, struct answer *answer) {
    while (r->replies < replies) {
        const char *begin = in->at + r->at;
        if (in->used - r->at < 5) return 0;
        size_t size = 1 + be32(begin + 1);
        if (in->used - r->at < size) return 0;
        if (*begin == 'Z') r->replies++;
        if (*begin == 'E') r->values = -1;
        if (*begin == 'D') {
            r->expected++;
            r->state = (int)r->at;
        }
        r->at += size;
    }
    answer->status = r->values < 0 ? 500 : 200;
    answer->messages = r->expected;
    /* Type, length, number of columns, length of the first. */
    if (r->expected) memcpy(answer->next, in->at + r->state + 1 + 4 + 2 + 4, 8);
    return r->at;
}

const struct protocol postgres = {"postgres", take, 8};
