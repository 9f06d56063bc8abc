/* A disk with controlled failures: preloaded into a daemon, it intercepts calls to the C library.
 *
 * It handles calls for files below one directory, and passes all others on. It is controlled by a block of memory that
 * the test and the daemon share (struct control; tests/torture/disk.py has the same layout). Optionally it logs every
 * change and every sync in order, with the bytes, from which tests/torture/power.py builds possible states after a
 * power cut.
 *
 * LevelDB's diary (LOG) is written through stdio, whose inner calls cannot be intercepted. No promise depends on it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* Values of fcntl.h on Linux; that header cannot be included, because its open() cannot be redefined. */
#define O_CREAT 0100
#define O_TRUNC 01000
#define O_TMPFILE 020200000
#define AT_FDCWD -100
#define AT_REMOVEDIR 0x200
#define O_RDWR 02
#define MAP_SHARED 1
#define PROT_RW 3

extern void *mmap(void *, size_t, int, int, int, off_t);

enum kind { OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, TRUNCATE, RMDIR, CREATE };

struct control {
    _Atomic uint64_t armed;   /* true: count calls, and let them fail */
    _Atomic uint64_t kinds;   /* bits: the kinds that are counted */
    _Atomic uint64_t calls;   /* counted so far */
    _Atomic uint64_t first;   /* the first call that fails, from 1 */
    _Atomic uint64_t last;    /* the last one */
    _Atomic uint64_t every;   /* of those, each every-th */
    _Atomic uint64_t error;   /* its errno; 0: no error, but a short write */
    _Atomic uint64_t torn;    /* a failing write has stored its first half */
    _Atomic uint64_t made;    /* faults so far */
    _Atomic uint64_t stalled; /* calls wait while it is set */
    _Atomic uint64_t waiting; /* number of waiting calls */
    _Atomic uint64_t slow_us; /* delay of every call */
    char what[256];           /* the latest call that failed */
};

#define FILES 65536
static unsigned char tracked[FILES];
static struct control *control;
static char root[PATH_MAX];
static size_t root_length;
static int log_fd = -1;
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name, result, ...)                                       \
    static result (*real)(__VA_ARGS__);                               \
    if (!real) real = (result(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static int open_plainly(const char *path, int flags) {
    REAL(open, int, const char *, int, ...);
    return real(path, flags, 0600);
}

__attribute__((constructor)) static void begin(void) {
    const char *directory = getenv("TORTURE_ROOT"), *shared = getenv("TORTURE_CONTROL"), *log = getenv("TORTURE_LOG");
    if (!directory || !shared) return;
    int fd = open_plainly(shared, O_RDWR);
    if (fd < 0) abort();
    control = mmap(NULL, sizeof *control, PROT_RW, MAP_SHARED, fd, 0);
    close(fd);
    if (control == (void *)-1) abort();
    snprintf(root, sizeof root, "%s", directory);
    root_length = strlen(root);
    /* O_WRONLY | O_APPEND */
    if (log) log_fd = open_plainly(log, 02001);
}

/* The absolute path if it is below the root, else NULL. */
static const char *below(int at, const char *path, char *buffer) {
    if (!control || !path) return NULL;
    if (path[0] != '/' && at != AT_FDCWD) {
        char link[64], directory[PATH_MAX];
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, directory, sizeof directory - 1);
        if (length < 0) return NULL;
        directory[length] = 0;
        if ((size_t)snprintf(buffer, PATH_MAX, "%s/%s", directory, path) >= PATH_MAX) return NULL;
        path = buffer;
    }
    if (strncmp(path, root, root_length) || (path[root_length] && path[root_length] != '/')) return NULL;
    return path;
}

static int is_tracked(int fd) { return control && fd >= 0 && fd < FILES && tracked[fd]; }

static void nap(long microseconds) {
    struct timespec time = {microseconds / 1000000, microseconds % 1000000 * 1000};
    nanosleep(&time, NULL);
}

/* True if this call has to fail; waits first if the disk is slow or stalled. */
static int fails(enum kind kind, const char *name, const char *path, int fd) {
    uint64_t armed = atomic_load(&control->armed);
    if (!armed || !(atomic_load(&control->kinds) >> kind & 1)) return 0;
    uint64_t slow = atomic_load(&control->slow_us);
    if (slow) nap((long)slow);
    if (atomic_load(&control->stalled)) {
        atomic_fetch_add(&control->waiting, 1);
        while (atomic_load(&control->stalled)) nap(1000);
        atomic_fetch_sub(&control->waiting, 1);
    }
    uint64_t number = atomic_fetch_add(&control->calls, 1) + 1, first = atomic_load(&control->first);
    uint64_t every = atomic_load(&control->every);
    if (!first || number < first || number > atomic_load(&control->last)) return 0;
    if (every > 1 && (number - first) % every) return 0;
    if (!atomic_load(&control->error) && kind != WRITE) return 0;
    char link[64], file[PATH_MAX];
    if (!path) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t length = readlink(link, file, sizeof file - 1);
        file[length < 0 ? 0 : length] = 0;
        path = file;
    }
    snprintf(control->what, sizeof control->what, "%s %.200s", name,
             strlen(path) > root_length ? path + root_length + 1 : ".");
    atomic_fetch_add(&control->made, 1);
    return 1;
}

static int failed(void) {
    errno = (int)atomic_load(&control->error);
    return -1;
}

/* One record: its head, then one and two. The caller holds `order`, so the file is in order. */
static void note(uint32_t kind, int32_t fd, uint64_t number, const void *one, uint32_t one_size, const void *two,
                 uint32_t two_size) {
    struct timespec now;
    int before = errno;
    clock_gettime(CLOCK_MONOTONIC, &now);
    struct {
        uint32_t kind;
        int32_t fd;
        uint64_t at_ns, number;
        uint32_t one_size, two_size;
    } head = {kind, fd, (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec, number, one_size, two_size};
    size_t size = sizeof head + one_size + two_size;
    char *record = malloc(size);
    if (!record) abort();
    memcpy(record, &head, sizeof head);
    if (one_size) memcpy(record + sizeof head, one, one_size);
    if (two_size) memcpy(record + sizeof head + one_size, two, two_size);
    REAL(write, ssize_t, int, const void *, size_t);
    if (real(log_fd, record, size) != (ssize_t)size) abort();
    free(record);
    errno = before;
}

static void enter(void) {
    if (log_fd >= 0) pthread_mutex_lock(&order);
}

static void leave(void) {
    if (log_fd >= 0) pthread_mutex_unlock(&order);
}

static void note_path(uint32_t kind, int fd, uint64_t number, const char *path) {
    if (log_fd >= 0) note(kind, fd, number, path, (uint32_t)strlen(path), NULL, 0);
}

/* --- opening and closing ----------------------------------------------------------------------- */

static int opened(int fd, const char *path, int flags) {
    if (fd < 0 || fd >= FILES) return fd;
    tracked[fd] = path != NULL;
    if (path) note_path(OPEN, fd, (uint64_t)flags, path);
    return fd;
}

#define OPENING(at, ...) \
    int mode = 0;                                                                         \
    if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                            \
        va_list more;                                                                     \
        va_start(more, flags);                                                            \
        mode = va_arg(more, int);                                                         \
        va_end(more);                                                                     \
    }                                                                                     \
    char buffer[PATH_MAX];                                                                \
    const char *there = below(at, path, buffer);                                          \
    if (there && flags & O_CREAT && fails(CREATE, "open", there, -1)) return failed();    \
    enter();                                                                              \
    int fd = opened(real(__VA_ARGS__, mode), there, flags);                               \
    leave();                                                                              \
    return fd

int open(const char *path, int flags, ...) {
    REAL(open, int, const char *, int, ...);
    OPENING(AT_FDCWD, path, flags);
}

int open64(const char *path, int flags, ...) {
    REAL(open64, int, const char *, int, ...);
    OPENING(AT_FDCWD, path, flags);
}

int openat(int at, const char *path, int flags, ...) {
    REAL(openat, int, int, const char *, int, ...);
    OPENING(at, at, path, flags);
}

int openat64(int at, const char *path, int flags, ...) {
    REAL(openat64, int, int, const char *, int, ...);
    OPENING(at, at, path, flags);
}

int close(int fd) {
    REAL(close, int, int);
    if (fd >= 0 && fd < FILES) tracked[fd] = 0;
    return real(fd);
}

/* --- writing ----------------------------------------------------------------------------------- */

static int writes_badly(const char *name, int fd, size_t *size, int *error) {
    *error = 0;
    if (!fails(WRITE, name, NULL, fd)) return 0;
    *error = (int)atomic_load(&control->error);
    if (!*error) *size = *size > 1 ? *size / 2 : *size;
    else *size = atomic_load(&control->torn) ? *size / 2 : 0;
    return 1;
}

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write, ssize_t, int, const void *, size_t);
    if (!is_tracked(fd)) return real(fd, data, size);
    int error, bad = writes_badly("write", fd, &size, &error);
    enter();
    ssize_t done = 0;
    if (size || !bad) {
        off_t at = lseek(fd, 0, SEEK_CUR);
        done = real(fd, data, size);
        if (done > 0 && log_fd >= 0) note(WRITE, fd, (uint64_t)at, data, (uint32_t)done, NULL, 0);
    }
    leave();
    if (!error) return done;
    errno = error;
    return -1;
}

static ssize_t write_at(const char *name, ssize_t (*real)(int, const void *, size_t, off_t), int fd, const void *data,
                        size_t size, off_t at) {
    int error, bad = writes_badly(name, fd, &size, &error);
    enter();
    ssize_t done = 0;
    if (size || !bad) {
        done = real(fd, data, size, at);
        if (done > 0 && log_fd >= 0) note(WRITE, fd, (uint64_t)at, data, (uint32_t)done, NULL, 0);
    }
    leave();
    if (!error) return done;
    errno = error;
    return -1;
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite, ssize_t, int, const void *, size_t, off_t);
    return is_tracked(fd) ? write_at("pwrite", real, fd, data, size, at) : real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    REAL(pwrite64, ssize_t, int, const void *, size_t, off_t);
    return is_tracked(fd) ? write_at("pwrite", real, fd, data, size, at) : real(fd, data, size, at);
}

static int truncate_to(int (*real)(int, off_t), int fd, off_t size) {
    if (!is_tracked(fd)) return real(fd, size);
    if (fails(TRUNCATE, "ftruncate", NULL, fd)) return failed();
    enter();
    int done = real(fd, size);
    if (!done && log_fd >= 0) note(TRUNCATE, fd, (uint64_t)size, NULL, 0, NULL, 0);
    leave();
    return done;
}

int ftruncate(int fd, off_t size) {
    REAL(ftruncate, int, int, off_t);
    return truncate_to(real, fd, size);
}

int ftruncate64(int fd, off_t size) {
    REAL(ftruncate64, int, int, off_t);
    return truncate_to(real, fd, size);
}

/* --- syncing: nothing is synced by a call that fails ------------------------------------------- */

static int sync_to(const char *name, int (*real)(int), int fd) {
    if (!is_tracked(fd)) return real(fd);
    if (fails(SYNC, name, NULL, fd)) return failed();
    enter();
    int done = real(fd);
    if (!done && log_fd >= 0) note(SYNC, fd, 0, NULL, 0, NULL, 0);
    leave();
    return done;
}

int fsync(int fd) {
    REAL(fsync, int, int);
    return sync_to("fsync", real, fd);
}

int fdatasync(int fd) {
    REAL(fdatasync, int, int);
    return sync_to("fdatasync", real, fd);
}

/* --- names ------------------------------------------------------------------------------------- */

static int renames(int from_at, const char *from, int to_at, const char *to, int (*real)(int, const char *, int, const char *)) {
    char one[PATH_MAX], two[PATH_MAX];
    const char *was = below(from_at, from, one), *is = below(to_at, to, two);
    if (!was || !is) return real(from_at, from, to_at, to);
    if (fails(RENAME, "rename", was, -1)) return failed();
    enter();
    int done = real(from_at, from, to_at, to);
    if (!done && log_fd >= 0) note(RENAME, -1, 0, was, (uint32_t)strlen(was), is, (uint32_t)strlen(is));
    leave();
    return done;
}

int renameat(int from_at, const char *from, int to_at, const char *to) {
    REAL(renameat, int, int, const char *, int, const char *);
    return renames(from_at, from, to_at, to, real);
}

static int rename_here(int from_at, const char *from, int to_at, const char *to) {
    REAL(rename, int, const char *, const char *);
    (void)from_at, (void)to_at;
    return real(from, to);
}

int rename(const char *from, const char *to) { return renames(AT_FDCWD, from, AT_FDCWD, to, rename_here); }

#define REMOVING(kind, name, there, call)                             \
    if (!there) return call;                                          \
    if (fails(kind, name, there, -1)) return failed();                \
    enter();                                                          \
    int done = call;                                                  \
    if (!done) note_path(kind, -1, 0, there);                         \
    leave();                                                          \
    return done

int unlink(const char *path) {
    REAL(unlink, int, const char *);
    char buffer[PATH_MAX];
    const char *there = below(AT_FDCWD, path, buffer);
    REMOVING(UNLINK, "unlink", there, real(path));
}

int unlinkat(int at, const char *path, int flags) {
    REAL(unlinkat, int, int, const char *, int);
    char buffer[PATH_MAX];
    const char *there = below(at, path, buffer);
    REMOVING(flags & AT_REMOVEDIR ? RMDIR : UNLINK, "unlink", there, real(at, path, flags));
}

int rmdir(const char *path) {
    REAL(rmdir, int, const char *);
    char buffer[PATH_MAX];
    const char *there = below(AT_FDCWD, path, buffer);
    REMOVING(RMDIR, "rmdir", there, real(path));
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir, int, const char *, mode_t);
    char buffer[PATH_MAX];
    const char *there = below(AT_FDCWD, path, buffer);
    REMOVING(MKDIR, "mkdir", there, real(path, mode));
}
