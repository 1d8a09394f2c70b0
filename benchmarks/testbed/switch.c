/* A switch between network namespaces that holds every frame for a fixed time.
 *
 *     switch DELAY_NANOSECONDS INTERFACE NAMESPACE_FILE...
 *
 * It makes a TAP device named INTERFACE in each namespace, writes a line when all are there, and
 * forwards until it is killed; the devices go with it. Kernels without netem have no other delay.
 *
 * With IFF_VNET_HDR a read gives up to 64 KiB of TCP at once, not yet cut into segments nor
 * summed, and the other device takes it as it is: a virtual network card's offloads
 * (Linux, Documentation/networking/tuntap.rst).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum {
    HEADER_BYTES = sizeof(struct virtio_net_hdr), /* what precedes a frame by default */
    ADDRESS_BYTES = 6,
    MOST_FRAME_BYTES = HEADER_BYTES + 14 + 4 + 65536,
    MOST_PORTS = 256,
    MOST_READS = 16, /* of one port before frames that are due get their turn */
};

struct port {
    int file;
    unsigned char address[ADDRESS_BYTES];
};

struct frame {
    struct frame *next;
    long long due_ns;
    int from;
    int bytes;
    unsigned char data[];
};

static struct port ports[MOST_PORTS];
static int port_count;

static void fail(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(1);
}

static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static struct port open_port(const char *interface, const char *namespace_path)
{
    struct port port;
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR};
    int namespace = open(namespace_path, O_RDONLY | O_CLOEXEC);
    if (namespace < 0 || setns(namespace, CLONE_NEWNET))
        fail(namespace_path);
    close(namespace);
    strncpy(request.ifr_name, interface, IFNAMSIZ - 1);
    port.file = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (port.file < 0)
        fail("/dev/net/tun");
    if (ioctl(port.file, TUNSETIFF, &request)
        || ioctl(port.file, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN)
        || ioctl(port.file, SIOCGIFHWADDR, &request))
        fail(interface);
    memcpy(port.address, request.ifr_hwaddr.sa_data, ADDRESS_BYTES);
    return port;
}

/* To the port that it is addressed to, or to all others if it is for many. */
static void forward(const struct frame *frame)
{
    const unsigned char *destination = frame->data + HEADER_BYTES;
    int for_many = destination[0] & 1;
    for (int to = 0; to < port_count; to++) {
        if (to == frame->from)
            continue;
        /* A device that is not up refuses it: lost, as on a cable that is not plugged in. */
        if ((for_many || !memcmp(destination, ports[to].address, ADDRESS_BYTES))
            && write(ports[to].file, frame->data, frame->bytes) < 0 && errno == EBADFD)
            fail("write");
    }
}

static struct frame *receive(int from, long long delay_ns)
{
    static unsigned char data[MOST_FRAME_BYTES];
    struct frame *frame;
    ssize_t bytes = read(ports[from].file, data, sizeof data);
    if (bytes < HEADER_BYTES + 14)
        return NULL;
    frame = malloc(sizeof *frame + bytes);
    if (!frame)
        fail("malloc");
    *frame = (struct frame){.due_ns = now_ns() + delay_ns, .from = from, .bytes = bytes};
    memcpy(frame->data, data, bytes);
    return frame;
}

static void forward_all(long long delay_ns)
{
    struct pollfd polled[MOST_PORTS];
    struct frame *first = NULL, **last = &first; /* the delay is the same for all: no sorting */
    for (int port = 0; port < port_count; port++)
        polled[port] = (struct pollfd){.fd = ports[port].file, .events = POLLIN};
    for (;;) {
        struct timespec left = {0};
        if (first) {
            long long left_ns = first->due_ns - now_ns();
            if (left_ns > 0)
                left = (struct timespec){left_ns / 1000000000LL, left_ns % 1000000000LL};
        }
        if (ppoll(polled, port_count, first ? &left : NULL, NULL) < 0 && errno != EINTR)
            fail("ppoll");
        for (int port = 0; port < port_count; port++) {
            struct frame *frame;
            for (int reads = 0; polled[port].revents && reads < MOST_READS; reads++) {
                if (!(frame = receive(port, delay_ns)))
                    break;
                *last = frame;
                last = &frame->next;
            }
        }
        for (long long now = now_ns(); first && first->due_ns <= now;) {
            struct frame *sent = first;
            forward(sent);
            if (!(first = sent->next))
                last = &first;
            free(sent);
        }
    }
}

int main(int count, char **arguments)
{
    if (count < 4 || count - 3 > MOST_PORTS) {
        fprintf(stderr, "usage: switch DELAY_NANOSECONDS INTERFACE NAMESPACE_FILE...\n");
        return 2;
    }
    int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (own < 0)
        fail("/proc/self/ns/net");
    for (port_count = 0; port_count < count - 3; port_count++)
        ports[port_count] = open_port(arguments[2], arguments[port_count + 3]);
    /* Back to where it is looked for when the testbed is removed. */
    if (setns(own, CLONE_NEWNET))
        fail("setns");
    puts("ready");
    fflush(stdout);
    forward_all(atoll(arguments[1]));
}
