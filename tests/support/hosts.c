/* The hosts of tests/hosts/bed, which tells of them in the environment. */
#include "hosts.h"

#include "transport/transport.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

enum { STORE_PORT = 7000, SKIPPED = 77 };

static const char *variable(const char *name, int number) {
    char key[32];
    snprintf(key, sizeof key, "BED_%s_%d", name, number);
    const char *value = getenv(key);
    return value ? value : "";
}

int hosts_count(void) {
    const char *count = getenv("BED_NHOSTS");
    return count ? (int)strtol(count, NULL, 10) : 0;
}

const char hosts_token[] = "of the hosts that are namespaces of one machine";

void hosts_store(char *url, size_t room) {
    snprintf(url, room, "tcp://%s:%d", variable("ADDR", 0), STORE_PORT);
}

/* /sys shows the network devices of the namespace that it was mounted in, and UCX looks there. */
void hosts_enter(int number) {
    char path[128];
    int count = hosts_count();
    const char *name = variable("HOST", count > 0 ? number % count : number);
    snprintf(path, sizeof path, "/run/netns/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNET) != 0 || unshare(CLONE_NEWNS | CLONE_NEWUTS) != 0 ||
        mount("", "/", "none", MS_SLAVE | MS_REC, NULL) != 0 || umount2("/sys", MNT_DETACH) != 0 ||
        mount(name, "/sys", "sysfs", 0, NULL) != 0 || sethostname(name, strlen(name)) != 0) {
        fprintf(stderr, "can't enter host '%s': %s\n", name, strerror(errno));
        exit(1);
    }
    close(fd);
    setenv("UCX_TLS", "tcp", 1);
}

void hosts_need_ucx(void) {
    bool is_known = false;
    for (const tb_transport_ops *const *ops = tb__transports; *ops; ops++)
        is_known |= strcmp((*ops)->name, "ucx") == 0;
    if (is_known && dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL))
        return;
    printf("skipped: nothing crosses hosts without UCX (apt-get install libucx0)\n");
    exit(SKIPPED);
}

bool hosts_do(const char *what) {
    char command[256];
    snprintf(command, sizeof command, "\"$BED\" %s", what);
    return system(command) == 0;
}
