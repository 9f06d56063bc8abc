/* What the load generator and the protocols it speaks share. */
#ifndef LOADGEN_H
#define LOADGEN_H

#include <stddef.h>
#include <stdint.h>

struct buffer {
    char *at;
    size_t used, size;
};

/* How far the answer at the start of a connection's buffer has been read. All zero when an answer begins, so that a
 * protocol can go on where it stopped: a page of a megabyte arrives in many pieces and is looked at once. */
struct reading {
    size_t at;          /* bytes understood */
    long replies;       /* of those that one request brings */
    long expected;      /* protocol's own: values still to come, bytes of a body */
    long values;        /* protocol's own */
    int state;          /* protocol's own */
};

struct answer {
    int status;         /* 200, or what went wrong */
    long messages;      /* delivered by it */
    char next[40];      /* the position after its last message, as the protocol writes it into a request */
};

struct protocol {
    const char *name;
    /* Bytes of the complete answer at the start of `in`, 0 while it is not complete. */
    size_t (*take)(struct buffer *in, struct reading *reading, long replies, struct answer *answer);
    /* Bytes of a position in a request that reads on; 0: the server remembers where the reader is. */
    size_t position_bytes;
};

extern const struct protocol http, redis, postgres, kafka, nats;

/* Whether answers carry messages that are counted; publishes need not be looked into. */
extern int counting;

uint32_t be32(const char *p);
uint64_t be64(const char *p);
void refuse(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
