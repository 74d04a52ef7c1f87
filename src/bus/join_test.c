/* What is told when a world can't be joined: URLs that are wrong, stores that are not there, programs that are none. */
#include "bus/bus_test.h"

#include "bus/store/server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

static tb_status join(const char *url, int timeout_ms) {
    tb_world *world = NULL;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = timeout_ms};
    tb_status status = tb_world_join(url, "a", 0, 1, &opts, &world);
    tb_world_destroy(world);
    return status;
}

/* A number below zero, or one that stands for "never". */
static bool has_odd_number(const char *sentence) {
    return strstr(sentence, " -") || strstr(sentence, "2147483647");
}

static void test_urls(void **state) {
    (void)state;
    static const struct {
        const char *url, *words;
    } cases[] = {
        {"tcp://0.0.0.0:80000", "store 'tcp://0.0.0.0:80000': port 80000 is out of range: ports are 1 to 65535"},
        {"tcp://127.0.0.1:65536", "port 65536 is out of range"},
        {"tcp://127.0.0.1:99999999999999999999", "port 99999999999999999999 is out of range"},
        {"tcp://127.0.0.1:0", "port 0 is for a server to listen at"},
        {"tcp://127.0.0.1", "store 'tcp://127.0.0.1': no port at its end"},
        {"tcp://127.0.0.1:", "no port at its end"},
        {"tcp://", "no port at its end"},
        {"tcp://127.0.0.1:7000x", "'7000x' is not a port"},
        {"tcp://127.0.0.1:-1", "'-1' is not a port"},
        {"tcp://127.0.0.1:+1", "'+1' is not a port"},
        {"tcp://127.0.0.1: 7000", "' 7000' is not a port"},
        {"tcp://127.0.0.1:7000/bus", "'7000/bus' is not a port"},
        {"tcp://::1:7000", "an IPv6 address goes into brackets"},
        {"tcp://[::1:7000", "the bracket before the IPv6 address is not closed"},
        {"tcp://[::1]", "no port at its end"},
        {"tcp://[::1]:", "no port at its end"},
        {"tcp://[::1]7000", "'7000' follows the brackets"},
        {"tcp://[::1]:80000", "port 80000 is out of range"},
        {"tcp://[]:7000", "no IPv6 address in the brackets"},
        {"tcp://127.0.0.1:7000?port=1", "only ?namespace=NAME may follow"},
        {"tcp:127.0.0.1:7000", "tcp://host:port"},
        {"unix:", "no path"},
        {"etcd://127.0.0.1:80000", "'127.0.0.1:80000': port 80000 is out of range: ports are 1 to 65535"},
        {"etcd://127.0.0.1:2379,127.0.0.1:0", "'127.0.0.1:0': port 0 is out of range"},
        {"etcd://127.0.0.1", "'127.0.0.1': no port at its end"},
        {"etcd://127.0.0.1:2379x", "'127.0.0.1:2379x': '2379x' is not a port"},
        {"etcd://::1:2379", "'::1:2379': an IPv6 address goes into brackets"},
        {"etcd://", "'' is not host:port"},
        {"etcd://127.0.0.1:2379,", "'' is not host:port"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t begun_ms = tb__now_ms();
        check_fails(join(cases[i].url, PATIENCE_MS), TB_INVALID, cases[i].words);
        check(tb__now_ms() - begun_ms < PATIENCE_MS / 2); /* at once */
    }
}

/* ---- Ports ----------------------------------------------------------------------------------------------------- */

/* A port of this test's own, at which nobody listens, or somebody does. */
static int open_port(bool listens, int *port) {
    struct sockaddr_in name = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof name;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    check(fd >= 0 && bind(fd, (struct sockaddr *)&name, sizeof name) == 0);
    check(getsockname(fd, (struct sockaddr *)&name, &length) == 0);
    check(!listens || listen(fd, 16) == 0);
    *port = ntohs(name.sin_port);
    return fd;
}

/* The deadline may come in any moment of an attempt: whichever it is, what is told is that nobody listens. */
static void check_refused(const char *url, const char *address, int timeout_ms) {
    check_fails(join(url, timeout_ms), TB_TIMEOUT, "connection refused, nobody listens at http://127.0.0.1:");
    check(strstr(tb_error_detail(), address));
    check(!strstr(tb_error_detail(), "silent") && !has_odd_number(tb_error_detail()));
}

static void test_refused(void **state) {
    (void)state;
    int port, fd = open_port(false, &port);
    char url[64], address[32];
    snprintf(address, sizeof address, "127.0.0.1:%d", port);
    snprintf(url, sizeof url, "etcd://%s", address);
    for (int timeout_ms = 1000; timeout_ms < 1500; timeout_ms += 73)
        check_refused(url, address, timeout_ms);
    for (int timeout_ms = 1; timeout_ms < 100; timeout_ms += 7) { /* too short for an answer, maybe */
        check_fails(join(url, timeout_ms), TB_TIMEOUT, address);
        check(!has_odd_number(tb_error_detail()));
    }
    close(fd);
}

static const char echo[] = "whatever it gets";

typedef struct stranger {
    int fd;
    const char *says; /* NULL: nothing, and hangs up */
    pthread_t thread;
} stranger;

/* Answers whoever comes with the same text, until it is shut down. */
static void *answer(void *arg) {
    const stranger *s = arg;
    for (int fd; (fd = accept(s->fd, NULL, NULL)) >= 0; close(fd)) {
        char byte, bytes[1024];
        ssize_t n;
        while (s->says == echo && (n = recv(fd, bytes, sizeof bytes, 0)) > 0)
            (void)!send(fd, bytes, (size_t)n, MSG_NOSIGNAL);
        if (s->says && recv(fd, &byte, 1, 0) == 1) {
            (void)!send(fd, s->says, strlen(s->says), MSG_NOSIGNAL);
            while (recv(fd, &byte, 1, 0) > 0)
                ;
        }
    }
    return NULL;
}

static void stranger_init(stranger *s, const char *says, int *port) {
    s->fd = open_port(true, port);
    s->says = says;
    check(pthread_create(&s->thread, NULL, answer, s) == 0);
}

static void stranger_fini(stranger *s) {
    shutdown(s->fd, SHUT_RDWR);
    pthread_join(s->thread, NULL);
    close(s->fd);
}

/* A program that is no store has the port. */
static void test_strangers(void **state) {
    (void)state;
    static const struct {
        const char *says, *words;
    } cases[] = {{"HTTP/1.1 400 Bad Request\r\n\r\n", "a program that is not a tensorbus store listens there"},
                 {"SSH-2.0-OpenSSH_9.2\r\n", "a program that is not a tensorbus store listens there"},
                 {echo, "a program that is not a tensorbus store listens there"},
                 {NULL, "has closed the connection without an answer: it is not a tensorbus store, or it is ending"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        stranger s;
        int port;
        char url[64];
        tb__store_server *server = NULL;
        stranger_init(&s, cases[i].says, &port);
        snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
        check_fails(join(url, 300), TB_TIMEOUT, cases[i].words);
        check(strstr(tb_error_detail(), url) && !has_odd_number(tb_error_detail()));
        check_fails(tb__store_server_start(url, "", &server), TB_CONFLICT,
                    "the port is taken, and not by a tensorbus store that answers: tcp://127.0.0.1:");
        check(strstr(tb_error_detail(), cases[i].words));
        stranger_fini(&s);
    }
}

/* One that says nothing at all, and a store. */
static void test_who_has_the_port(void **state) {
    (void)state;
    int port, fd = open_port(true, &port);
    char url[64];
    tb__store_server *server = NULL, *other = NULL;
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", port);
    check_fails(join(url, 300), TB_TIMEOUT, "silent: a program listens there, but does not answer");
    check_fails(tb__store_server_start(url, "", &server), TB_CONFLICT, "not by a tensorbus store that answers");
    close(fd);
    check_ok(tb__store_server_start("tcp://127.0.0.1:0", "a secret of more than thirty-two bytes", &server));
    snprintf(url, sizeof url, "%s", tb__store_server_url(server));
    check_fails(tb__store_server_start(url, "a secret of more than thirty-two bytes", &other), TB_CONFLICT,
                "another process serves it");
    check_fails(tb__store_server_start(url, "a wrong one of more than 32 bytes...", &other), TB_CONFLICT,
                "another process serves it");
    tb__store_server_stop(server);
}

/* The same where etcd is expected. */
static void test_not_etcd(void **state) {
    (void)state;
    stranger s;
    int port, fd = open_port(true, &port);
    char url[64], words[128];
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d", port);
    snprintf(words, sizeof words, "http://127.0.0.1:%d accepts connections but does not answer within ", port);
    check_fails(join(url, 300), TB_TIMEOUT, words);
    check(strstr(tb_error_detail(), " ms: is it etcd?") && !has_odd_number(tb_error_detail()));
    close(fd);
    stranger_init(&s, "SSH-2.0-OpenSSH_9.2\r\n", &port);
    snprintf(url, sizeof url, "etcd://127.0.0.1:%d", port);
    snprintf(words, sizeof words, "http://127.0.0.1:%d answers, but not in HTTP: is it etcd?", port);
    check_fails(join(url, 5000), TB_REFUSED, words);
    stranger_fini(&s);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_urls),      cmocka_unit_test(test_refused),
        cmocka_unit_test(test_strangers), cmocka_unit_test(test_who_has_the_port),
        cmocka_unit_test(test_not_etcd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
