/* What is done when this process has no file descriptors left: what failed is tried again, connections are accepted
 * only if there is room for what they bring, and peers that have to be given up are told why. */
#include "transport/shm/shm.h"

#include "base/descriptors.h"
#include "base/log.h"
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/timerfd.h>
#include <unistd.h>

void shm_retry_later(shm *s, const char *what, int error) {
    struct itimerspec when = {.it_value = tb__time_of_ms(TB__RELISTEN_MS)}, now;
    if (timerfd_gettime(s->retry, &now) == 0 && (now.it_value.tv_sec || now.it_value.tv_nsec))
        return;
    if (tb__may_warn(&s->warn_again_ms))
        tb__log(TB_LOG_WARN, "transport shm: %s: %s; it is tried again", what, tb__errno_text(error));
    timerfd_settime(s->retry, 0, &when, NULL);
}

void shm_tell_shortage(shm *s, shm_link *link, uint32_t features) {
    if (features & SHM_KNOWS_SHORTAGE)
        shm_link_send(s, link, &(shm_frame){.kind = SHM_SHORTAGE, .nbytes = tb__descriptor_limit()}, -1);
}

void shm_give_up(shm *s, shm_peer *peer) {
    char why[256];
    snprintf(why, sizeof why, "what it sent can't be received: %s", tb__errno_text(EMFILE));
    shm_tell_shortage(s, peer->in, peer->features);
    shm_lose(s, peer, why);
}

bool shm_reserve(shm *s, shm_link *link) {
    for (size_t i = 0; i < SHM_MEETING_FDS; i++)
        link->reserved[i] = -1;
    for (size_t i = 0; i < SHM_MEETING_FDS; i++) {
        link->reserved[i] = tb__fd_own(fcntl(s->wake, F_DUPFD_CLOEXEC, 0));
        if (link->reserved[i] < 0)
            return false;
    }
    return true;
}

void shm_release_reserved(shm_link *link) {
    for (size_t i = 0; i < SHM_MEETING_FDS; i++) {
        tb__fd_close(link->reserved[i]);
        link->reserved[i] = -1;
    }
}
