// delaytap NETNS IFNAME HERETAP DELAY_US: a cable with a delay, for kernels without netem.
//
// Makes a TAP interface in the namespace and one here, and carries packets between them, each DELAY_US late. Says "ready".
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define MOST 16384
struct packet { uint64_t due; int bytes; char* at; };
static struct { struct packet packets[MOST]; unsigned head, tail; } queues[2];

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static int make_tap(const char* name) {
    int fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    struct ifreq request = {0};
    request.ifr_flags = IFF_TAP | IFF_NO_PI;
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    if (fd < 0 || ioctl(fd, TUNSETIFF, &request) != 0) {
        perror(name);
        exit(1);
    }
    return fd;
}

int main(int argc, char** argv) {
    if (argc != 5) return 2;
    char path[256];
    snprintf(path, sizeof path, "/var/run/netns/%s", argv[1]);
    int here = open("/proc/self/ns/net", O_RDONLY), there = open(path, O_RDONLY), fds[2];
    if (setns(there, CLONE_NEWNET) != 0) return perror(path), 1;
    fds[0] = make_tap(argv[2]);
    if (setns(here, CLONE_NEWNET) != 0) return 1;
    fds[1] = make_tap(argv[3]);
    const uint64_t delay_ns = strtoull(argv[4], NULL, 10) * 1000;
    prctl(PR_SET_TIMERSLACK, 1000);
    puts("ready");
    fflush(stdout);
    while (1) {
        uint64_t now = now_ns();
        int64_t wait_ns = -1;
        struct pollfd ready[2];
        for (int i = 0; i < 2; i++) {
            while (queues[i].head != queues[i].tail) {
                struct packet* packet = &queues[i].packets[queues[i].head % MOST];
                int64_t left = (int64_t)(packet->due - now);
                if (left <= 0 && (write(fds[1 - i], packet->at, (size_t)packet->bytes) >= 0 || errno != EAGAIN)) {
                    free(packet->at);
                    queues[i].head++;
                    continue;
                }
                if (left <= 0) left = 50000;
                if (wait_ns < 0 || left < wait_ns) wait_ns = left;
                break;
            }
            ready[i] = (struct pollfd){fds[i], queues[i].tail - queues[i].head >= MOST ? 0 : POLLIN, 0};
        }
        struct timespec limit = {wait_ns / 1000000000, wait_ns % 1000000000};
        if (ppoll(ready, 2, wait_ns < 0 ? NULL : &limit, NULL) < 0) continue;
        for (int i = 0; i < 2; i++) {
            static char buffer[66000];
            int bytes, burst = 64;
            while ((ready[i].revents & POLLIN) && burst-- && queues[i].tail - queues[i].head < MOST &&
                   (bytes = (int)read(fds[i], buffer, sizeof buffer)) > 0) {
                struct packet* packet = &queues[i].packets[queues[i].tail++ % MOST];
                *packet = (struct packet){now_ns() + delay_ns, bytes, malloc((size_t)bytes)};
                memcpy(packet->at, buffer, (size_t)bytes);
            }
        }
    }
}
