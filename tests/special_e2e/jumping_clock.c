/* Lets the wall clock of a process jump while it runs: LD_PRELOAD this, and name a file in VERL_TEST_CLOCK whose first
 * eight bytes are the jump in seconds. The monotonic clock and every wait keep their true length, as on a machine whose
 * clock is set: a wait until a wall-clock time is shortened by the jump that its deadline already contains.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LEAST_WALL_TIME 1000000000 /* seconds; a monotonic clock, which counts from the boot, is far below */

static const volatile int64_t *jump_s;

__attribute__((constructor)) static void map_jump(void) {
    const char *path = getenv("VERL_TEST_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        jump_s = page;
}

static int64_t jump(void) { return jump_s ? *jump_s : 0; }

static struct timespec true_time(const struct timespec *deadline) {
    struct timespec shifted = *deadline;
    if (shifted.tv_sec > LEAST_WALL_TIME)
        shifted.tv_sec -= jump();
    return shifted;
}

/* ---- reading the clock */

int clock_gettime(clockid_t clock, struct timespec *now) {
    static __typeof__(&clock_gettime) real;
    if (!real)
        real = NEXT(clock_gettime);
    int result = real(clock, now);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += jump();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    static __typeof__(&gettimeofday) real;
    if (!real)
        real = NEXT(gettimeofday);
    int result = real(now, zone);
    if (result == 0)
        now->tv_sec += jump();
    return result;
}

time_t time(time_t *now) {
    struct timespec read;
    clock_gettime(CLOCK_REALTIME, &read);
    if (now)
        *now = read.tv_sec;
    return read.tv_sec;
}

/* ---- waiting until a time */

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *deadline) {
    static __typeof__(&pthread_cond_timedwait) real;
    if (!real) /* on x86-64 dlsym finds an older version, which has another layout of conditions */
        real = (__typeof__(real))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = NEXT(pthread_cond_timedwait);
    struct timespec shifted = true_time(deadline);
    return real(condition, mutex, &shifted);
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    struct timespec shifted = true_time(deadline);
    return NEXT(pthread_mutex_timedlock)(mutex, &shifted);
}

int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    struct timespec shifted = true_time(deadline);
    return NEXT(sem_timedwait)(semaphore, &shifted);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *rest) {
    struct timespec shifted = flags & TIMER_ABSTIME ? true_time(until) : *until;
    return NEXT(clock_nanosleep)(clock, flags, &shifted, rest);
}

long syscall(long number, ...) {
    static __typeof__(&syscall) real;
    if (!real)
        real = NEXT(syscall);
    va_list list;
    long given[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        given[i] = va_arg(list, long);
    va_end(list);
    struct timespec shifted;
    if (number == SYS_futex && given[1] & FUTEX_CLOCK_REALTIME && given[3]) {
        shifted = true_time((const struct timespec *)given[3]);
        given[3] = (long)&shifted;
    }
    return real(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
