/* Which network interfaces UCX listens on. UCX trusts its network: a malformed frame trips one of its assertions, and
 * its handler of PUT writes to any address that a frame names. So, unless UCX_NET_DEVICES says otherwise, it gets no
 * interface whose address is public. */
#include "transport/ucx/ucx.h"

#include "base/log.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

/* Whether packets to the address can come from anywhere. Private: RFC 1918, 6598, 3927, 4193, loopback, link-local. */
static bool is_public(const struct sockaddr *address) {
    if (address->sa_family == AF_INET6) {
        const uint8_t *b = ((const struct sockaddr_in6 *)address)->sin6_addr.s6_addr;
        return (b[0] & 0xe0) == 0x20; /* 2000::/3, all that is assigned */
    }
    uint32_t a = ntohl(((const struct sockaddr_in *)address)->sin_addr.s_addr);
    return a >> 24 != 10 && a >> 24 != 127 && a >> 20 != 0xac1 && a >> 16 != 0xc0a8 && a >> 16 != 0xa9fe &&
           a >> 22 != 0x191;
}

/* The address by which UCX uses an interface: its IPv4 one, if it has one. NULL: it has none. */
static const struct sockaddr *address_of(const struct ifaddrs *all, const char *name) {
    const struct sockaddr *found = NULL;
    for (const struct ifaddrs *at = all; at; at = at->ifa_next) {
        if (!at->ifa_addr || strcmp(at->ifa_name, name) != 0 || !(at->ifa_flags & IFF_UP))
            continue;
        if (at->ifa_addr->sa_family == AF_INET)
            return at->ifa_addr;
        if (at->ifa_addr->sa_family == AF_INET6 && (!found || is_public(at->ifa_addr)))
            found = at->ifa_addr;
    }
    return found;
}

_Static_assert(TB__ADDRESS_TEXT == INET6_ADDRSTRLEN, "an address fits");

bool tb__interface_is_public(const char *name, char address[TB__ADDRESS_TEXT]) {
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all) != 0)
        return false;
    const struct sockaddr *found = address_of(all, name);
    bool result = found && is_public(found);
    if (result)
        inet_ntop(found->sa_family,
                  found->sa_family == AF_INET ? (const void *)&((const struct sockaddr_in *)found)->sin_addr
                                              : (const void *)&((const struct sockaddr_in6 *)found)->sin6_addr,
                  address, INET6_ADDRSTRLEN);
    freeifaddrs(all);
    return result;
}

static void add_rdma_ports(tb__text *out) {
    DIR *devices = opendir("/sys/class/infiniband");
    for (const struct dirent *device; devices && (device = readdir(devices));) {
        char path[512];
        if (device->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports", device->d_name);
        DIR *ports = opendir(path);
        for (const struct dirent *port; ports && (port = readdir(ports));) {
            if (port->d_name[0] != '.')
                tb__text_add(out, "%s%s:%s", out->count ? "," : "", device->d_name, port->d_name);
        }
        if (ports)
            closedir(ports);
    }
    if (devices)
        closedir(devices);
}

bool ucx_list_private_devices(tb__text *out) {
    struct if_nameindex *names = if_nameindex();
    bool has_public = false;
    for (const struct if_nameindex *at = names; at && at->if_index != 0; at++) {
        char address[INET6_ADDRSTRLEN];
        if (tb__interface_is_public(at->if_name, address)) {
            tb__log(TB_LOG_INFO, "ucx: interface %s is left out: its address %s is public", at->if_name, address);
            has_public = true;
        } else {
            tb__text_add(out, "%s%s", out->count ? "," : "", at->if_name);
        }
    }
    if (names)
        if_freenameindex(names);
    add_rdma_ports(out);
    return has_public;
}
