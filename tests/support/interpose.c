/* Stands between a process and its C library: makes file I/O fail, come short or hang, and moves
 * the wall clock, as a control file says that a test changes while the process runs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { READ = 1, WRITE = 2, SYNC = 4, PART_MAX = 64, POLL_NS = 5 * 1000 * 1000 };

/* As `Faults` in interpose.py lays it out. */
struct control {
    volatile int64_t clock_jump_s;
    volatile uint32_t calls;  /* which calls; 0: none */
    volatile int32_t error;   /* errno; 0: no error */
    volatile uint32_t short_bytes; /* move no more than this; 0: all */
    volatile uint32_t stuck;  /* calls do not return while this is set */
    volatile uint64_t first, last; /* which bytes of a file */
    volatile uint64_t hits;
    char part[PART_MAX]; /* of the file's path */
};

static struct control none, *control = &none;

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("KVTIERD_FAULTS");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return;
    void *map = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map != MAP_FAILED)
        control = map;
}

static int meant(int fd, uint32_t call, uint64_t offset, uint64_t size)
{
    char link[64], path[PATH_MAX];
    if (!(control->calls & call) || (call != SYNC && !(offset < control->last && offset + size > control->first)))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return strstr(path, control->part) != NULL;
}

/* How many bytes may move; -1 with errno for an error. */
static ssize_t allowed(int fd, uint32_t call, uint64_t offset, uint64_t size)
{
    if (!meant(fd, call, offset, size))
        return size;
    __atomic_add_fetch(&control->hits, 1, __ATOMIC_RELAXED);
    while (control->stuck)
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    if (control->error) {
        errno = control->error;
        return -1;
    }
    return control->short_bytes && control->short_bytes < size ? control->short_bytes : size;
}

static uint64_t total(const struct iovec *parts, int count)
{
    uint64_t size = 0;
    for (int i = 0; i < count; i++)
        size += parts[i].iov_len;
    return size;
}

/* The leading parts that have `size` bytes; returns how many parts. */
static int cut(const struct iovec *parts, int count, uint64_t size, struct iovec *into)
{
    int kept = 0;
    for (; kept < count && size; kept++) {
        into[kept] = parts[kept];
        if (into[kept].iov_len > size)
            into[kept].iov_len = size;
        size -= into[kept].iov_len;
    }
    return kept;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

#define PLAIN(name, pointer, call)                                            \
    ssize_t name(int fd, pointer data, size_t size, off64_t offset)           \
    {                                                                         \
        ssize_t left = allowed(fd, call, offset, size);                       \
        return left < 0 ? left : NEXT(name)(fd, data, left, offset);          \
    }

#define VECTOR(name, call, declare, pass)                                                  \
    ssize_t name(int fd, const struct iovec *parts, int count, off64_t offset declare)     \
    {                                                                                      \
        struct iovec some[IOV_MAX];                                                        \
        uint64_t size = total(parts, count);                                               \
        ssize_t left = allowed(fd, call, offset, size);                                    \
        if (left < 0)                                                                      \
            return left;                                                                   \
        if ((uint64_t)left == size || count > IOV_MAX)                                     \
            return NEXT(name)(fd, parts, count, offset pass);                              \
        return NEXT(name)(fd, some, cut(parts, count, left, some), offset pass);           \
    }

#define COMMA ,
PLAIN(pread, void *, READ)
PLAIN(pread64, void *, READ)
PLAIN(pwrite, const void *, WRITE)
PLAIN(pwrite64, const void *, WRITE)
VECTOR(preadv, READ, , )
VECTOR(preadv64, READ, , )
VECTOR(preadv2, READ, COMMA int flags, COMMA flags)
VECTOR(preadv64v2, READ, COMMA int flags, COMMA flags)
VECTOR(pwritev, WRITE, , )
VECTOR(pwritev64, WRITE, , )
VECTOR(pwritev2, WRITE, COMMA int flags, COMMA flags)
VECTOR(pwritev64v2, WRITE, COMMA int flags, COMMA flags)

int fdatasync(int fd)
{
    return allowed(fd, SYNC, 0, 0) < 0 ? -1 : NEXT(fdatasync)(fd);
}

int fsync(int fd)
{
    return allowed(fd, SYNC, 0, 0) < 0 ? -1 : NEXT(fsync)(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = NEXT(clock_gettime)(clock, now);
    if (!result && clock == CLOCK_REALTIME)
        now->tv_sec += control->clock_jump_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone)
{
    int result = NEXT(gettimeofday)(now, zone);
    if (!result)
        now->tv_sec += control->clock_jump_s;
    return result;
}

time_t time(time_t *into)
{
    time_t now = NEXT(time)(NULL) + control->clock_jump_s;
    if (into != NULL)
        *into = now;
    return now;
}
