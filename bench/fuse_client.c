/*
 * A FUSE program that mounts as libfuse does, answers the first request, and serves nothing.
 *
 *     fuse_client FUSERMOUNT hold DIRECTORY...   mounts on all and prints a line; holds the mounts
 *                                                until stdin ends
 *     fuse_client FUSERMOUNT cycle DIRECTORY     for each line on stdin: mounts and unmounts, and
 *                                                prints how many microseconds each took; -1 for
 *                                                what failed
 *
 * A mount has taken until the program has the descriptor of /dev/fuse and sees the mount, an unmount
 * until the mount is gone.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static const char *fusermount;

static long now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

/* Return which mount is at a path; its file system is not asked. */
static uint64_t mount_at(const char *path)
{
    struct statx status = {0};
    statx(AT_FDCWD, path, AT_STATX_DONT_SYNC | AT_NO_AUTOMOUNT, STATX_MNT_ID, &status);
    return status.stx_mnt_id;
}

static int receive_descriptor(int from)
{
    char byte, control[CMSG_SPACE(sizeof(int))];
    struct iovec part = {.iov_base = &byte, .iov_len = 1};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof control};
    if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) <= 0)
        return -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS)
        return -1;
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    return descriptor;
}

/* Mount, and return /dev/fuse, or -1. */
static int mount_on(const char *directory, long *took_us)
{
    int pair[2], status = 0;
    uint64_t before = mount_at(directory);
    long started = now_us();
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
        return -1;
    pid_t child = fork();
    if (!child) {
        char number[16];
        close(pair[1]);
        snprintf(number, sizeof number, "%d", pair[0]);
        setenv("_FUSE_COMMFD", number, 1);
        execl(fusermount, fusermount, "-o", "fsname=bench,subtype=bench", "--", directory, NULL);
        _exit(1);
    }
    close(pair[0]);
    int device = receive_descriptor(pair[1]);
    int is_visible = mount_at(directory) != before;
    *took_us = now_us() - started;
    waitpid(child, &status, 0);
    close(pair[1]);
    if (device >= 0 && !is_visible) {
        close(device);
        return -1;
    }
    return device;
}

/* Answer INIT, which the kernel asks as soon as it has mounted. */
static int answer(int device)
{
    static char request[1 << 18];
    struct {
        struct fuse_out_header header;
        struct fuse_init_out init;
    } reply = {0};
    if (read(device, request, sizeof request) < (ssize_t)sizeof(struct fuse_in_header))
        return -1;
    reply.header.len = sizeof reply;
    reply.header.unique = ((struct fuse_in_header *)request)->unique;
    reply.init.major = FUSE_KERNEL_VERSION;
    reply.init.minor = 31;
    reply.init.max_write = 1 << 17;
    return write(device, &reply, sizeof reply) == sizeof reply ? 0 : -1;
}

/* Unmount as libfuse does at the end of a program. */
static int unmount(const char *directory, long *took_us)
{
    int status = 1;
    uint64_t before = mount_at(directory);
    long started = now_us();
    pid_t child = fork();
    if (!child) {
        execl(fusermount, fusermount, "-u", "-q", "-z", "--", directory, NULL);
        _exit(1);
    }
    waitpid(child, &status, 0);
    *took_us = now_us() - started;
    return status || mount_at(directory) == before ? -1 : 0;
}

static void cycle(const char *directory)
{
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        long mounted_us = -1, unmounted_us = -1;
        int device = mount_on(directory, &mounted_us);
        if (device < 0 || answer(device))
            mounted_us = -1;
        if (device >= 0) {
            close(device);
            if (unmount(directory, &unmounted_us))
                unmounted_us = -1;
        }
        printf("%ld %ld\n", mounted_us, unmounted_us);
        fflush(stdout);
    }
}

static int hold(char **directories)
{
    long took_us;
    for (char **directory = directories; *directory; directory++) {
        int device = mount_on(*directory, &took_us);
        if (device < 0 || answer(device))
            return 1;
    }
    puts("held");
    fflush(stdout);
    while (getchar() != EOF)
        ;
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 2;
    fusermount = argv[1];
    if (!strcmp(argv[2], "hold"))
        return hold(argv + 3);
    cycle(argv[3]);
    return 0;
}
