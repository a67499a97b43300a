/*
 * Fuzzes the helper's input: its arguments, the path of the mount point, the broker's replies.
 *
 * The first byte selects the input. Build it with clang's libFuzzer: `make fuzz`.
 */
#define main helper_main
#include "fusermount.c"
#undef main

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_arguments(const uint8_t *data, size_t size)
{
    static struct call call;
    char bytes[8192], place[PATH_MAX], *argv[66] = {"fusermount3"};
    int argc = 1;
    if (size >= sizeof bytes)
        return;
    memcpy(bytes, data, size);
    bytes[size] = 0;
    for (char *c = bytes; c < bytes + size && argc < 65; c += strlen(c) + 1)
        argv[argc++] = c;
    memset(&call, 0, sizeof call);
    optind = 0; /* makes glibc's getopt start again */
    if (parse(argc, argv, "3", &call) < 0 || call.shows)
        return;
    if (strlen(call.options) > PACKET_MAX - HEADER || !*call.path)
        abort();
    if (!resolve(call.path, place) && place[0] != '/')
        abort();
}

/* The second byte selects the expected reply, and the number of its descriptors. */
static void read_reply(const uint8_t *data, size_t size)
{
    static const enum operation expected[] = {MOUNT, UNMOUNT, SYNC_INIT, CONTINUE};
    struct reply reply;
    int pair[2], fds[8];
    if (!size || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair))
        return;
    unsigned count = data[0] >> 2 & 7;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof fds)];
    } control = {0};
    struct iovec part = {.iov_base = (void *)(uintptr_t)(data + 1), .iov_len = size - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    for (unsigned i = 0; i < count; i++)
        fds[i] = pair[0];
    if (count) {
        message.msg_control = control.space;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        control.header.cmsg_level = SOL_SOCKET;
        control.header.cmsg_type = SCM_RIGHTS;
        control.header.cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(&control.header), fds, count * sizeof(int));
    }
    int next = dup(pair[0]);
    close(next);
    if (sendmsg(pair[0], &message, MSG_NOSIGNAL) >= 0) {
        int result = receive(pair[1], expected[data[0] & 3], 0, &reply);
        if (!result && strlen(reply.text) > PACKET_MAX - HEADER)
            abort();
        if ((result || reply.error) && reply.fd >= 0)
            abort();
        if (reply.fd >= 0)
            close(reply.fd);
        int after = dup(pair[0]);
        if (after != next)
            abort(); /* a descriptor was left open */
        close(after);
    }
    close(pair[0]);
    close(pair[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    is_quiet = true;
    if (size && data[0] & 1)
        read_arguments(data + 1, size - 1);
    else if (size)
        read_reply(data + 1, size - 1);
    return 0;
}
