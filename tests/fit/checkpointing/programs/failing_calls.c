/* Preloaded into a program, it has one call of the operating system fail: FAULT_CALL with FAULT_ERRNO, for paths below FAULT_UNDER, as
   long as the file FAULT_SWITCH is there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(const char *call, const char *path) {
    const char *chosen = getenv("FAULT_CALL"), *under = getenv("FAULT_UNDER"), *lever = getenv("FAULT_SWITCH");
    if (!chosen || !under || !lever || !path || strcmp(call, chosen) || !strstr(path, under)) return 0;
    int before = errno, is_on = access(lever, F_OK) == 0;
    errno = is_on ? atoi(getenv("FAULT_ERRNO")) : before;
    return is_on;
}

static int fails_for(const char *call, int file) {
    char link[64], path[PATH_MAX + 1];
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, PATH_MAX);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

int fsync(int file) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fails_for("fsync", file) ? -1 : real(file);
}

ssize_t write(int file, const void *data, size_t count) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t (*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return fails_for("write", file) ? -1 : real(file, data, count);
}

int rename(const char *from, const char *to) {
    static int (*real)(const char *, const char *);
    if (!real) real = (int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename");
    if (!fails("rename", from)) return fails("lost answer of rename", from) ? (real(from, to), errno = ESTALE, -1) : real(from, to);
    return -1;
}

int mkdir(const char *path, unsigned mode) {
    static int (*real)(const char *, unsigned);
    if (!real) real = (int (*)(const char *, unsigned))dlsym(RTLD_NEXT, "mkdir");
    return fails("mkdir", path) ? -1 : real(path, mode);
}
