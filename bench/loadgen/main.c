/* A load generator on raw sockets: fixed requests over kept connections, one at a time on each; one thread, epoll.
 *
 * Options are those of bench/load.py, its replacement in Python where there is no compiler, and some more:
 *
 *   --port P --request-file F   in equal numbers, dealt to the connections in turn
 *   --everywhere                every connection sends all requests in turn (one port)
 *   --protocol NAME             http, redis, postgres, kafka or nats
 *   --hello-file F --hello-replies N   bytes that a connection sends first, and its replies
 *   --replies N                 replies to one request
 *   --number                    replace "@@@@" in requests and hello by the connection's number
 *   --rate R                    open loop: a request is due every 1/R seconds; waits count from then
 *   --walk AT [--again]         read page after page: write each page's end to byte AT of the request; --again: forever
 *   --messages                  count the messages in responses
 *   --sequence AT --sequences N the N numbers from byte AT on, Avro longs of equal length, grow by N with each request
 *
 * It prints one JSON object (see bench/load.py), ends after --requests or --seconds or at SIGTERM, and fails after 60
 * seconds without a response. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "loadgen.h"

enum { MAX_FILES = 4096, PATIENCE_MS = 60000, EVENTS = 256 };
#define DRAIN_S 10.0 /* how long an open loop waits for answers after its last arrival */

struct connection {
    int fd;
    int busy, greeted;
    struct buffer *requests; /* one, or all of them with --everywhere */
    int count, turn;
    size_t sent;
    const struct buffer *sending;
    struct buffer in, hello;
    struct reading reading;
    double due;
};

struct latencies {
    double *at;
    size_t used, size;
};

static const struct protocol *const PROTOCOLS[] = {&http, &redis, &postgres, &kafka, &nats};
static volatile sig_atomic_t enough;
int counting;

void refuse(const char *format, ...) {
    va_list rest;
    va_start(rest, format);
    vfprintf(stderr, format, rest);
    va_end(rest);
    fputc('\n', stderr);
    exit(2);
}

static void fail(const char *what) { refuse("%s: %s", what, strerror(errno)); }

uint32_t be32(const char *p) {
    const unsigned char *u = (const unsigned char *)p;
    return (uint32_t)u[0] << 24 | (uint32_t)u[1] << 16 | (uint32_t)u[2] << 8 | u[3];
}

uint64_t be64(const char *p) { return (uint64_t)be32(p) << 32 | be32(p + 4); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double processor_time(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void *room(void *at, size_t bytes) {
    void *got = realloc(at, bytes);
    if (!got) refuse("out of memory");
    return got;
}

static void note(struct latencies *l, double value) {
    if (l->used == l->size) l->at = room(l->at, (l->size = l->size ? l->size * 2 : 1 << 16) * sizeof *l->at);
    l->at[l->used++] = value;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double at_share(const struct latencies *l, double share) {
    return l->used ? l->at[(size_t)((double)l->used * share)] : 0;
}

static struct buffer file(const char *path) {
    struct buffer b = {0};
    int fd = open(path, O_RDONLY);
    if (fd < 0) fail(path);
    for (;;) {
        if (b.used == b.size) b.at = room(b.at, b.size = b.size ? b.size * 2 : 1 << 16);
        ssize_t n = read(fd, b.at + b.used, b.size - b.used);
        if (n < 0) fail(path);
        if (n == 0) break;
        b.used += (size_t)n;
    }
    close(fd);
    return b;
}

/* The buffer itself, or a copy if the connection writes to it. */
static struct buffer own(const struct buffer *from, int copied, int numbered, int number) {
    if (!copied && !numbered) return *from;
    struct buffer b = {.at = room(NULL, from->used + 1), .used = from->used, .size = from->used + 1};
    memcpy(b.at, from->at, from->used);
    char digits[16];
    snprintf(digits, sizeof digits, "%04d", number % 10000);
    for (char *p = b.at; numbered && (p = memmem(p, b.used - (size_t)(p - b.at), "@@@@", 4)); p += 4) memcpy(p, digits, 4);
    return b;
}

static int dial(const char *host, int port) {
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (inet_pton(AF_INET, host, &a.sin_addr) != 1) refuse("%s is no address", host);
    if (fd < 0 || connect(fd, (struct sockaddr *)&a, sizeof a) < 0) fail("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

static int ep;

static void push(struct connection *c) {
    int waited = c->sent > 0;
    while (c->sent < c->sending->used) {
        ssize_t n = write(c->fd, c->sending->at + c->sent, c->sending->used - c->sent);
        if (n < 0 && errno == EAGAIN) break;
        if (n < 0) fail("write");
        c->sent += (size_t)n;
    }
    int whole = c->sent == c->sending->used;
    if (whole && !waited) return; /* registered for responses already */
    struct epoll_event e = {.events = EPOLLIN | (whole ? 0 : EPOLLOUT), .data.ptr = c};
    epoll_ctl(ep, EPOLL_CTL_MOD, c->fd, &e);
}

static void begin(struct connection *c, const struct buffer *what, double due) {
    c->sending = what;
    c->sent = 0;
    c->due = due;
    c->busy = 1;
    push(c);
}

static long sequence = -1, sequences = 1;

/* Increments consecutive Avro longs in place (zigzag, so by twice the number; seven bits a byte, lowest first). */
static void advance(struct buffer *request) {
    char *p = request->at + sequence, *end = request->at + request->used;
    for (long i = 0; i < sequences; i++) {
        unsigned long carry = 2 * (unsigned long)sequences;
        for (int more = 1; more && p < end; p++) {
            unsigned long sum = (unsigned char)*p % 128 + carry;
            more = (unsigned char)*p >= 128;
            *p = (char)(sum % 128 + (more ? 128 : 0));
            carry = sum / 128;
            if (!more && carry) refuse("the sequence ids have come to the end of their length");
        }
    }
}

static void ask(struct connection *c, double due) {
    struct buffer *next = &c->requests[c->turn];
    c->turn = (c->turn + 1) % c->count;
    if (sequence >= 0) advance(next);
    begin(c, next, due);
}

/* Reads available bytes; returns 1 if they complete a response, which is then removed from the buffer. */
static int hear(struct connection *c, const struct protocol *p, long replies, struct answer *answer, long *received) {
    if (c->in.size - c->in.used < 1 << 16) c->in.at = room(c->in.at, c->in.size = c->in.size ? c->in.size * 2 : 1 << 18);
    ssize_t got = read(c->fd, c->in.at + c->in.used, c->in.size - c->in.used);
    if (got < 0 && errno == EAGAIN) return 0;
    if (got <= 0) refuse("the server closed a connection");
    c->in.used += (size_t)got;
    memset(answer, 0, sizeof *answer);
    size_t size = p->take(&c->in, &c->reading, replies, answer);
    if (!size) return 0;
    *received += (long)size; /* of complete responses only, consistent with their number */
    if (answer->status != 200) {
        static int shown;
        if (!shown++) {
            fprintf(stderr, "%d: ", answer->status);
            for (size_t i = 0; i < size && i < 600; i++) fputc(c->in.at[i] < 32 && c->in.at[i] != '\n' ? ' ' : c->in.at[i], stderr);
            fputc('\n', stderr);
        }
    }
    memmove(c->in.at, c->in.at + size, c->in.used - size);
    c->in.used -= size;
    memset(&c->reading, 0, sizeof c->reading);
    return 1;
}

static void stop(int signal) {
    (void)signal;
    enough = 1;
}

int main(int argc, char **argv) {
    static const struct option OPTIONS[] = {
        {"host", 1, 0, 'h'},         {"port", 1, 0, 'p'},          {"connections", 1, 0, 'c'}, {"requests", 1, 0, 'r'},
        {"warm-up", 1, 0, 'w'},      {"seconds", 1, 0, 's'},       {"request-file", 1, 0, 'f'}, {"everywhere", 0, 0, 'e'},
        {"protocol", 1, 0, 'P'},     {"hello-file", 1, 0, 'H'},    {"hello-replies", 1, 0, 'A'}, {"replies", 1, 0, 'a'},
        {"number", 0, 0, 'n'},       {"rate", 1, 0, 'R'},          {"walk", 1, 0, 'W'},        {"again", 0, 0, 'g'},
        {"messages", 0, 0, 'm'},     {"sequence", 1, 0, 'S'},      {"sequences", 1, 0, 'N'},  {0, 0, 0, 0}};
    const char *host = "127.0.0.1", *files[MAX_FILES], *hello_file = NULL;
    const struct protocol *protocol = &http;
    int ports[MAX_FILES], port_count = 0, file_count = 0, connections = 16, everywhere = 0, numbered = 0, again = 0;
    long requests = 10000, warm_up = 0, replies = 1, hello_replies = 1, walk = -1;
    double seconds = 0, rate = 0;
    for (int o; (o = getopt_long(argc, argv, "", OPTIONS, NULL)) != -1;) {
        switch (o) {
        case 'h': host = optarg; break;
        case 'p': if (port_count < MAX_FILES) ports[port_count++] = atoi(optarg); break;
        case 'c': connections = atoi(optarg); break;
        case 'r': requests = atol(optarg); break;
        case 'w': warm_up = atol(optarg); break;
        case 's': seconds = atof(optarg); break;
        case 'f': if (file_count < MAX_FILES) files[file_count++] = optarg; break;
        case 'e': everywhere = 1; break;
        case 'H': hello_file = optarg; break;
        case 'A': hello_replies = atol(optarg); break;
        case 'a': replies = atol(optarg); break;
        case 'n': numbered = 1; break;
        case 'R': rate = atof(optarg); break;
        case 'W': walk = atol(optarg); counting = 1; break;
        case 'g': again = 1; break;
        case 'm': counting = 1; break;
        case 'S': sequence = atol(optarg); break;
        case 'N': sequences = atol(optarg); break;
        case 'P':
            protocol = NULL;
            for (size_t i = 0; i < sizeof PROTOCOLS / sizeof *PROTOCOLS; i++)
                if (!strcmp(PROTOCOLS[i]->name, optarg)) protocol = PROTOCOLS[i];
            if (!protocol) refuse("no protocol %s", optarg);
            break;
        default: return 2;
        }
    }
    if (!port_count || !file_count || connections < 1) refuse("--port, --request-file and connections are needed");
    if (!everywhere && port_count != file_count) refuse("as many --port as --request-file");
    if (rate > 0 && seconds <= 0) refuse("an open loop needs --seconds");
    signal(SIGTERM, stop);
    signal(SIGPIPE, SIG_IGN);

    struct buffer bodies[MAX_FILES], hello = {0};
    for (int i = 0; i < file_count; i++) bodies[i] = file(files[i]);
    if (hello_file) hello = file(hello_file);
    for (int i = 0; walk > 0 && i < file_count; i++)
        if ((size_t)walk + protocol->position_bytes > bodies[i].used) refuse("no position at byte %ld", walk);
    ep = epoll_create1(0);
    int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    if (ep < 0 || timer < 0) fail("epoll");
    /* Edge-triggered: setting it again is enough, it need not be read. */
    struct epoll_event tick = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    epoll_ctl(ep, EPOLL_CTL_ADD, timer, &tick);
    struct connection *all = calloc((size_t)connections, sizeof *all), **idle = calloc((size_t)connections, sizeof *idle);
    if (!all || !idle) refuse("out of memory");
    long received = 0;
    struct answer answer;
    for (int i = 0; i < connections; i++) {
        struct connection *c = &all[i];
        c->fd = dial(host, ports[i % port_count]);
        c->count = everywhere ? file_count : 1;
        c->requests = room(NULL, (size_t)c->count * sizeof *c->requests);
        for (int j = 0; j < c->count; j++) c->requests[j] = own(&bodies[everywhere ? j : i % file_count], walk >= 0 || sequence >= 0, numbered, i);
        c->turn = i % c->count; /* so that connections do not all use the same topic */
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(ep, EPOLL_CTL_ADD, c->fd, &e);
        if (!hello_file) continue;
        c->hello = own(&hello, 0, numbered, i);
        begin(c, &c->hello, 0);
        int whole = 0, count = counting;
        counting = 0;
        while (!whole) {
            struct epoll_event woken[1];
            if (epoll_wait(ep, woken, 1, PATIENCE_MS) <= 0) refuse("no answer to the greeting");
            if (c->sent < c->sending->used) push(c);
            whole = hear(c, protocol, hello_replies, &answer, &received);
        }
        counting = count;
        c->busy = 0;
        if (answer.status != 200) refuse("the greeting was refused");
    }

    struct latencies took = {0}, late = {0};
    long completed = 0, measured = 0, bad = 0, messages = 0, arrivals = 0, sent = 0, outstanding = 0, unsent = 0;
    int statuses[1000] = {0}, idle_count = 0, exhausted = 0;
    double cpu = processor_time(), start = now(), finish = start;
    double until = seconds > 0 ? start + seconds : INFINITY, last_due = start;
    for (int i = connections; i-- > 0;) idle[idle_count++] = &all[i];
    received = 0;
    if (warm_up) until = INFINITY;

    for (;;) {
        double t = now();
        int open_loop = rate > 0 && completed >= warm_up;
        if (open_loop) {
            /* Send all due requests while there are free connections; the others wait, and their wait counts. */
            while (idle_count && !enough) {
                double due = start + (double)arrivals / rate;
                if (due >= until || due > t) break;
                struct connection *c = idle[--idle_count];
                /* It was due while a connection was free: the delay is the generator's own. */
                if (due >= last_due) note(&late, t - due);
                ask(c, due);
                arrivals++;
                outstanding++;
            }
            double due = start + (double)arrivals / rate;
            int over = enough || due >= until;
            if (over && !outstanding) break;
            if (t > until + DRAIN_S) {
                /* The server cannot keep up: count the waits so far. */
                for (; start + (double)arrivals / rate < until; arrivals++, unsent++) note(&took, t - (start + (double)arrivals / rate));
                for (int i = 0; i < connections; i++)
                    if (all[i].busy) note(&took, t - all[i].due), unsent++;
                break;
            }
            if (!over && idle_count) {
                struct itimerspec at = {.it_value = {(time_t)due, (long)((due - floor(due)) * 1e9)}};
                timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
            }
        } else {
            while (idle_count && !enough && !exhausted && sent < (rate > 0 ? 0 : requests) + warm_up && t < until) {
                ask(idle[--idle_count], t);
                sent++;
                outstanding++;
            }
            if (!outstanding) break;
        }
        struct epoll_event events[EVENTS];
        int n = epoll_wait(ep, events, EVENTS, PATIENCE_MS);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) refuse("no answer in a minute");
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (!c) continue; /* the timer: a request is due */
            if (events[i].events & EPOLLOUT) push(c);
            if (!(events[i].events & ~(uint32_t)EPOLLOUT) || !hear(c, protocol, replies, &answer, &received)) continue;
            finish = now();
            c->busy = 0;
            outstanding--;
            if (++completed == warm_up) {
                /* Measuring begins here; requests in flight count from now. */
                start = last_due = finish;
                cpu = processor_time();
                received = 0;
                if (seconds > 0) until = start + seconds;
                for (int j = 0; j < connections; j++) all[j].due = finish;
            } else if (completed > warm_up) {
                note(&took, finish - c->due);
                measured++;
                messages += answer.messages;
                statuses[answer.status < 1000 ? answer.status : 999]++;
                bad += answer.status != 200;
            }
            if (walk >= 0 && answer.messages) {
                if (protocol->position_bytes) memcpy(c->requests[0].at + walk, answer.next, protocol->position_bytes);
            } else if (walk >= 0) {
                /* The end of the topic. */
                if (!again) exhausted = 1;
                else memcpy(c->requests[0].at + walk, bodies[(c - all) % file_count].at + walk, protocol->position_bytes);
            }
            if (!idle_count) last_due = rate > 0 ? finish : last_due;
            idle[idle_count++] = c;
        }
    }
    cpu = processor_time() - cpu;
    double lasted = finish - start;
    if (took.used) qsort(took.at, took.used, sizeof *took.at, ascending);
    if (late.used) qsort(late.at, late.used, sizeof *late.at, ascending);
    printf("{\"connections\": %d, \"requests\": %ld, \"seconds\": %.4f, \"requests_per_s\": %.1f", connections, measured, lasted,
           lasted > 0 ? (double)measured / lasted : 0);
    printf(", \"p50_ms\": %.4f, \"p90_ms\": %.4f, \"p99_ms\": %.4f, \"p999_ms\": %.4f, \"max_ms\": %.4f", at_share(&took, 0.5) * 1e3,
           at_share(&took, 0.9) * 1e3, at_share(&took, 0.99) * 1e3, at_share(&took, 0.999) * 1e3,
           took.used ? took.at[took.used - 1] * 1e3 : 0);
    printf(", \"messages\": %ld, \"received_bytes\": %ld, \"cpu_s\": %.4f", messages, received, cpu);
    if (rate > 0)
        printf(", \"rate\": %.1f, \"unsent\": %ld, \"late_p99_ms\": %.4f, \"late_max_ms\": %.4f", rate, unsent, at_share(&late, 0.99) * 1e3,
               late.used ? late.at[late.used - 1] * 1e3 : 0);
    printf(", \"statuses\": {");
    for (int i = 0, first = 1; i < 1000; i++)
        if (statuses[i]) printf("%s\"%d\": %d", first ? "" : ", ", i, statuses[i]), first = 0;
    printf("}}\n");
    return 0;
}
