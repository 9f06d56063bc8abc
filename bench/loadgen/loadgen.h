/* Shared by the load generator and its protocols. */
#ifndef LOADGEN_H
#define LOADGEN_H

#include <stddef.h>
#include <stdint.h>

struct buffer {
    char *at;
    size_t used, size;
};

/* Progress in parsing the response at the start of a connection's buffer; all zero when a response begins. A protocol
 * continues where it stopped: a page of a megabyte arrives in many pieces, and each byte is parsed once. */
struct reading {
    size_t at;          /* bytes parsed */
    long replies;       /* replies parsed, of those to one request */
    long expected;      /* protocol's own: values still expected, bytes of a body */
    long values;        /* protocol's own */
    int state;          /* protocol's own */
};

struct answer {
    int status;         /* 200, or the error's */
    long messages;      /* delivered by the response */
    char next[40];      /* the position after its last message, as the protocol writes it into a request */
};

struct protocol {
    const char *name;
    /* Size of the complete response at the start of `in`; 0 while it is incomplete. */
    size_t (*take)(struct buffer *in, struct reading *reading, long replies, struct answer *answer);
    /* Size of the start position in a request for the next page; 0: the server keeps it. */
    size_t position_bytes;
};

extern const struct protocol http, redis, postgres, kafka, nats;

/* True if messages in responses are counted; responses to publishes are not parsed for them. */
extern int counting;

uint32_t be32(const char *p);
uint64_t be64(const char *p);
void refuse(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

#endif
