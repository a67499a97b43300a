/*
 * fusermount3 for an unprivileged pod: asks the node's broker to mount or unmount a file system.
 *
 * FUSE libraries call this program like the original fusermount3. It makes no decisions: it sends
 * the broker an open descriptor of the mount point and the unchanged options, and passes the
 * descriptor of /dev/fuse that the broker returns to the FUSE program. The broker makes all checks.
 * muster_fuse/protocol.py describes the packets.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#ifndef SOCKET
#define SOCKET "/run/muster-fuse/broker.sock"
#endif
#ifndef CONNECT_MS
#define CONNECT_MS 30000 /* longer than a restart of the broker takes */
#endif
#ifndef REPLY_MS
#define REPLY_MS 10000
#endif
#ifndef MOUNT_MS
#define MOUNT_MS 15000 /* after CONTINUE: the broker itself waits for 10 s */
#endif
#define CONTINUE_MS 300000 /* as in libfuse 3.19 */
#define PAUSE_MAX_MS 1000
#define VERSION "3.17.4" /* the version of fusermount3 whose arguments are supported */

enum { HEADER = 16, PACKET_MAX = 4096, FDS_MAX = 4, INHERITED_MAX = 65536 };
enum operation { MOUNT = 1, UNMOUNT = 2, SYNC_INIT = 4, CONTINUE = 5 };
enum flag { LAZY = 1, WITH_SYNC_INIT = 2 };

struct call {
    const char *path;
    char options[PACKET_MAX - HEADER + 1];
    long comm_fd;
    bool unmounts, is_lazy, is_quiet, stays, only_stays, syncs, shows;
};

struct reply {
    int error; /* the errno from the broker; 0 for success */
    int fd;    /* -1 if there is none */
    char text[PACKET_MAX];
};

static const char *program = "fusermount3";
static bool is_quiet;

static int fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Print one line about an error and return -1. */
static int fail(const char *format, ...)
{
    char line[2 * PACKET_MAX];
    va_list values;
    va_start(values, format);
    vsnprintf(line, sizeof line, format, values);
    va_end(values);
    for (char *c = line; *c; c++)
        if ((unsigned char)*c < ' ' || *c == 0x7f)
            *c = '?';
    if (!is_quiet)
        fprintf(stderr, "%s: %s\n", program, line);
    return -1;
}

static int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* Return whether a descriptor can be read, or was closed by its peer, before the deadline. */
static bool is_ready(int fd, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - now_ms();
        struct pollfd waiting = {.fd = fd, .events = POLLIN};
        int count = poll(&waiting, 1, left > 0 ? (int)left : 0);
        if (count >= 0 || errno != EINTR)
            return count > 0;
    }
}

/* Return whether a name is among the options, which commas separate unless they are escaped. */
static bool has_option(const char *options, const char *name)
{
    size_t length = strlen(name), used = 0;
    bool differs = false;
    for (const char *c = options;; c++) {
        if (*c == ',' || !*c) {
            if (!differs && used == length)
                return true;
            if (!*c)
                return false;
            used = 0;
            differs = false;
        } else {
            if (*c == '\\' && c[1])
                c++;
            differs |= used >= length || *c != name[used];
            used++;
        }
    }
}

static int add_options(struct call *call, const char *options)
{
    size_t used = strlen(call->options), more = strlen(options);
    if (used + more + (used && more) >= sizeof call->options)
        return fail("the options are longer than %zu bytes", sizeof call->options - 1);
    if (used && more)
        call->options[used++] = ',';
    memcpy(call->options + used, options, more + 1);
    return 0;
}

static int read_number(const char *text, long *number)
{
    char *end;
    errno = 0;
    *number = strtol(text, &end, 10);
    return !*text || *end || errno || *number < 0 || *number > INT_MAX ? -1 : 0;
}

/* Print the version or the help if this option requests it; return whether it does. */
static bool shows(int option)
{
    if (option == 'V')
        puts("fusermount3 version: " VERSION " (muster)");
    else if (option == 'h')
        printf("%s: [options] mountpoint\n"
               "Asks the node's broker at %s to mount or unmount a FUSE file system.\n"
               " -o OPTION[,OPTION...]  mount with options\n"
               " -u                     unmount\n"
               " -z                     unmount even if it is in use\n"
               " -q                     say nothing if that fails\n"
               " -h                     print this\n"
               " -V                     print the version\n",
               program, SOCKET);
    return option == 'V' || option == 'h';
}

/* Read the arguments, in any order, as every version of fusermount does. */
static int parse(int argc, char **argv, const char *comm_fd, struct call *call)
{
    static const struct option names[] = {
        {"unmount", no_argument, NULL, 'u'},      {"lazy", no_argument, NULL, 'z'},
        {"quiet", no_argument, NULL, 'q'},        {"help", no_argument, NULL, 'h'},
        {"version", no_argument, NULL, 'V'},      {"options", required_argument, NULL, 'o'},
        {"auto-unmount", no_argument, NULL, 'U'}, {"comm-fd", required_argument, NULL, 'c'},
        {"sync-init", no_argument, NULL, 'S'},    {NULL, 0, NULL, 0},
    };
    int option;
    opterr = 0;
    while ((option = getopt_long(argc, argv, "hVo:uzq", names, NULL)) != -1) {
        if (option == '?')
            return fail("an unknown option, or one without its value; see -h");
        if (option == 'o' && add_options(call, optarg) < 0)
            return -1;
        if (option == 'c')
            comm_fd = optarg;
        call->shows |= shows(option);
        call->unmounts |= option == 'u';
        call->is_lazy |= option == 'z';
        call->is_quiet |= option == 'q';
        call->only_stays |= option == 'U';
        call->syncs |= option == 'S';
        if (call->shows)
            return 0;
    }
    if (call->is_lazy && !call->unmounts)
        return fail("-z can only be used with -u");
    if (argc - optind != 1 || !argv[optind][0])
        return fail(argc > optind + 1 ? "more than one mount point" : "a mount point is missing");
    call->path = argv[optind];
    call->stays = call->only_stays || has_option(call->options, "auto_unmount");
    if (call->unmounts && !call->only_stays)
        return 0;
    if (!comm_fd)
        return fail("a FUSE program has to call this, with _FUSE_COMMFD in its environment");
    if (read_number(comm_fd, &call->comm_fd) < 0)
        return fail("_FUSE_COMMFD is not a descriptor: %s", comm_fd);
    return 0;
}

/* Write the real path to `place`. The last component is not touched, as its file system may hang. */
static int resolve(const char *path, char place[PATH_MAX])
{
    char copy[PATH_MAX], parent[PATH_MAX];
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    if (length >= sizeof copy)
        return fail("the path is too long");
    memcpy(copy, path, length);
    copy[length] = 0;
    char *slash = strrchr(copy, '/');
    char *last = slash ? slash + 1 : copy;
    bool is_whole = !*last || !strcmp(last, ".") || !strcmp(last, "..");
    const char *above = is_whole ? copy : slash == copy ? "/" : slash ? copy : ".";
    if (!is_whole && slash && slash != copy)
        *slash = 0;
    if (!realpath(above, parent))
        return fail("bad mount point %s: %s", path, strerror(errno));
    const char *between = !is_whole && strcmp(parent, "/") ? "/" : "";
    int written = snprintf(place, PATH_MAX, "%s%s%s", parent, between, is_whole ? "" : last);
    return written < PATH_MAX ? 0 : fail("the path is too long");
}

/* Close all inherited descriptors except one: a copy of /dev/fuse would keep a mount alive. */
static void close_others(int kept)
{
    if (kept > 3)
        syscall(SYS_close_range, 3U, (unsigned)kept - 1, 0U);
    unsigned first = kept < 3 ? 3 : (unsigned)kept + 1;
    if (!syscall(SYS_close_range, first, ~0U, 0U))
        return;
    for (int fd = 3; fd < INHERITED_MAX; fd++) /* Linux before 5.9 */
        if (fd != kept)
            close(fd);
}

static const char *socket_path(void)
{
    const char *path = getenv("MUSTER_FUSE_SOCKET");
    return path && *path ? path : SOCKET;
}

/* Return whether the directory of a file does not exist. */
static bool is_missing(const char *path)
{
    char directory[PATH_MAX];
    snprintf(directory, sizeof directory, "%s", path);
    char *slash = strrchr(directory, '/');
    if (slash)
        *slash = 0;
    return slash && access(directory, F_OK);
}

/* Connect to the broker, which may be restarting. */
static int dial(int64_t deadline)
{
    const char *path = socket_path();
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return fail("the path of the broker's socket is too long: %s", path);
    memcpy(address.sun_path, path, strlen(path));
    for (long pause_ms = 20;; pause_ms = pause_ms * 2 > PAUSE_MAX_MS ? PAUSE_MAX_MS : pause_ms * 2) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return fail("cannot make a socket: %s", strerror(errno));
        if (!connect(fd, (struct sockaddr *)&address, sizeof address))
            return fd;
        int error = errno;
        close(fd);
        if (error == ENOENT && is_missing(path))
            return fail("%s: no such directory; the container needs the volume of fuse.muster.dev",
                        path);
        if (error != ECONNREFUSED && error != ENOENT && error != EAGAIN)
            return fail("no connection to the broker: %s: %s", path, strerror(error));
        if (now_ms() >= deadline)
            return fail("the broker has been away for %d s: %s: %s", CONNECT_MS / 1000, path,
                        strerror(error));
        struct timespec wait = {.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000};
        nanosleep(&wait, NULL);
    }
}

static void put(unsigned char *at, uint32_t value)
{
    for (int byte = 0; byte < 4; byte++)
        at[byte] = (unsigned char)(value >> (8 * byte));
}

static uint32_t get(const unsigned char *at)
{
    return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

/* Send bytes, with a descriptor unless it is -1; return 0, or -1 with errno. */
static int send_with(int to, const void *bytes, size_t size, int fd)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.space;
        message.msg_controllen = sizeof control.space;
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(&control.header), &fd, sizeof fd);
    }
    ssize_t sent;
    do
        sent = sendmsg(to, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent == (ssize_t)size ? 0 : -1;
}

static int send_request(int broker, enum operation operation, int flags, const char *text, int fd)
{
    unsigned char packet[PACKET_MAX] = {'M', 'F', 'U', 'S', 1};
    size_t length = strlen(text);
    packet[5] = (unsigned char)operation;
    packet[6] = (unsigned char)flags;
    put(packet + 12, (uint32_t)length);
    memcpy(packet + HEADER, text, length); /* add_options has checked the length */
    return send_with(broker, packet, HEADER + length, fd);
}

/* Keep the descriptor of a message; close surplus ones. Return how many there were. */
static int take_fds(struct msghdr *message, int *kept)
{
    int count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = CMSG_LEN(0); at + sizeof(int) <= c->cmsg_len; at += sizeof(int)) {
            int fd;
            memcpy(&fd, (char *)c + at, sizeof fd);
            if (count++)
                close(fd);
            else
                *kept = fd;
        }
    }
    return count;
}

/* Receive a reply. Return 0, -1 after printing an error, or 1 if the request was never read. */
static int receive(int broker, enum operation expected, int64_t deadline, struct reply *reply)
{
    unsigned char packet[PACKET_MAX];
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(FDS_MAX * sizeof(int))];
    } control;
    struct iovec part = {.iov_base = packet, .iov_len = sizeof packet};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control.space,
                             .msg_controllen = sizeof control.space};
    reply->fd = -1;
    if (!is_ready(broker, deadline))
        return fail("the broker did not answer in time");
    ssize_t size = recvmsg(broker, &message, MSG_CMSG_CLOEXEC);
    if (size < 0 && errno == ECONNRESET)
        return 1;
    int count = size < 0 ? 0 : take_fds(&message, &reply->fd);
    if (size <= 0 && !count)
        return fail("the broker ended before it answered");
    uint32_t length = size >= HEADER ? get(packet + 12) : 0;
    uint32_t error = size >= HEADER ? get(packet + 8) : 0;
    bool has_fd = !error && (expected == SYNC_INIT || expected == MOUNT);
    if (size < HEADER || memcmp(packet, "MFUS\1", 5) || length != (size_t)size - HEADER ||
        error > INT_MAX || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC) || count != has_fd ||
        (packet[5] != expected && (has_fd || packet[5] != MOUNT))) {
        if (reply->fd >= 0)
            close(reply->fd);
        reply->fd = -1;
        return fail("the broker's answer cannot be understood");
    }
    reply->error = (int)error;
    memcpy(reply->text, packet + HEADER, length);
    reply->text[length] = 0;
    return 0;
}

static int failed(enum operation operation, const char *place, const char *text)
{
    return fail("cannot %s %s: %s", operation == UNMOUNT ? "unmount" : "mount on", place, text);
}

static const char *why(const struct reply *reply)
{
    return *reply->text ? reply->text : strerror(reply->error);
}

/*
 * Send the broker a request; return the open connection, or -1 after printing an error.
 *
 * The descriptor is closed as soon as it is sent: while it is open, the mount is in use.
 */
static int ask(enum operation operation, int flags, const char *options, const char *place,
               struct reply *reply)
{
    enum operation expected = flags & WITH_SYNC_INIT && operation == MOUNT ? SYNC_INIT : operation;
    for (int64_t deadline = now_ms() + CONNECT_MS;;) {
        int fd = open(place, O_PATH | O_CLOEXEC | (operation == UNMOUNT ? O_NOFOLLOW : 0));
        if (fd < 0)
            return failed(operation, place, strerror(errno));
        int broker = dial(deadline);
        int error = broker < 0 || !send_request(broker, operation, flags, options, fd) ? 0 : errno;
        close(fd);
        if (broker < 0)
            return -1;
        int result = 1;
        if (!error)
            result = receive(broker, expected, now_ms() + REPLY_MS, reply);
        else if (error != EPIPE && error != ECONNRESET)
            result = failed(operation, place, strerror(error));
        if (!result && !reply->error)
            return broker;
        close(broker);
        if (!result)
            result = failed(operation, place, why(reply));
        if (result < 0)
            return -1;
        if (now_ms() >= deadline)
            return fail("the broker restarts again and again");
    }
}

static int unmount(const char *place, bool is_lazy)
{
    struct reply reply;
    int broker = ask(UNMOUNT, is_lazy ? LAZY : 0, "", place, &reply);
    if (broker < 0)
        return -1;
    close(broker);
    return 0;
}

/* With sync-init: wait until the program is ready, request the mount, and send it the result. */
static int finish(int broker, int comm, const char *place)
{
    struct reply reply = {0};
    char byte;
    if (!is_ready(comm, now_ms() + CONTINUE_MS) || recv(comm, &byte, 1, 0) != 1)
        return fail("the program ended before it was ready");
    int result = send_request(broker, CONTINUE, 0, "", -1);
    if (result)
        fail("the broker ended before the mount");
    else
        result = receive(broker, CONTINUE, now_ms() + MOUNT_MS, &reply);
    int32_t status = result ? -EIO : -reply.error;
    if (reply.error)
        failed(MOUNT, place, why(&reply));
    if (send_with(comm, &status, sizeof status, -1))
        return fail("the program ended before it knew of its mount");
    return status ? -1 : 0;
}

static int mount_on(const char *place, const struct call *call)
{
    struct reply reply;
    int comm = (int)call->comm_fd, flags = call->syncs ? WITH_SYNC_INIT : 0, result = 0;
    int broker = ask(MOUNT, flags, call->options, place, &reply);
    if (broker < 0)
        return -1;
    if (send_with(comm, "", 1, reply.fd)) {
        result = fail("cannot give the descriptor to the program: %s", strerror(errno));
        if (!call->syncs) {
            is_quiet = true;
            unmount(place, true); /* no process would serve it */
        }
    }
    close(reply.fd);
    if (!result && call->syncs)
        result = finish(broker, comm, place);
    close(broker);
    return result;
}

/* Wait until the program has ended, and remove the mount if it is dead. */
static int stay(const char *place, int comm)
{
    char bytes[16];
    ssize_t size;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    setsid();
    int null = open("/dev/null", O_RDWR);
    for (int fd = 0; null >= 0 && fd < 3; fd++)
        if (fd != comm)
            dup2(null, fd);
    close_others(comm);
    do
        size = recv(comm, bytes, sizeof bytes, 0);
    while (size > 0 || (size < 0 && errno == EINTR));
    int root = open(place, O_RDONLY | O_CLOEXEC);
    /* aborted: the descriptor of /dev/fuse was closed while the kernel asked for the directory */
    if (root >= 0 || (errno != ENOTCONN && errno != ECONNABORTED))
        return 0;
    return unmount(place, true);
}

static int run(const struct call *call)
{
    char place[PATH_MAX];
    struct stat status;
    int comm = call->unmounts && !call->only_stays ? -1 : (int)call->comm_fd;
    if (comm >= 0 && (fstat(comm, &status) < 0 || !S_ISSOCK(status.st_mode)))
        return fail("_FUSE_COMMFD is not a socket: %d", comm);
    close_others(comm);
    if (resolve(call->path, place) < 0)
        return -1;
    if (comm < 0)
        return unmount(place, call->is_lazy);
    if (!call->only_stays && mount_on(place, call) < 0)
        return -1;
    if (chdir("/") < 0)
        return fail("cannot change to the root directory: %s", strerror(errno));
    return call->stays ? stay(place, comm) : 0;
}

int main(int argc, char **argv)
{
    static struct call call;
    if (argc > 0 && argv[0][0])
        program = strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0];
    if (parse(argc, argv, getenv("_FUSE_COMMFD"), &call) < 0)
        return EXIT_FAILURE;
    if (call.shows)
        return fflush(stdout) ? EXIT_FAILURE : EXIT_SUCCESS;
    is_quiet = call.is_quiet && call.unmounts;
    return run(&call) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
