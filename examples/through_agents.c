/* Two programs that leave the bus to agents. The trainer has a matrix cut by rows over two processes, the inference
 * engine wants it cut by columns over two others; each of the four talks to an agent of its own, which has its seat.
 * "through_agents SOCKET" is one of the four: which one, the agent tells. "through_agents --all TENSORBUS" starts four
 * agents with that tool, and the four programs. */
#include <tensorbus/tensorbus.h>

#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { ROWS = 600, COLUMNS = 400, SEATS = 2, VERSIONS = 3, TIMEOUT_MS = 20000 };

/* ---- The programs ---------------------------------------------------------------------------------------------- */

static float value(int version, int row, int column) {
    return (float)(row * COLUMNS + column) + (float)version / 4;
}

/* Begins to send, and sleeps until the agent posts the semaphore; a program with other work would do it meanwhile. */
static bool send_version(tb_client_batch *batch) {
    char name[64];
    struct timespec deadline;
    tb_client_status status = {.size = sizeof status};
    snprintf(name, sizeof name, "/through_agents-%ld", (long)getpid());
    sem_t *done = sem_open(name, O_CREAT | O_EXCL, 0600, 0);
    if (done == SEM_FAILED) {
        perror(name);
        return false;
    }
    tb_client_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS, .no_wait = true, .semaphore = name};
    bool ok = tb_client_transfer(batch, true, &opts) == TB_OK;
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += 2 * TIMEOUT_MS / 1000;
    while (ok && sem_timedwait(done, &deadline) != 0)
        ok = errno == EINTR;
    sem_close(done);
    if (!ok)
        sem_unlink(name); /* else the agent has */
    /* The semaphore says that it has ended, not how. */
    ok = ok && tb_client_query(batch, &status) == TB_OK;
    if (ok && *status.error)
        tb_error_set(TB_LOST, status.error);
    return ok && !*status.error;
}

static bool run_version(tb_client_batch *batch, bool is_trainer, int index, int version, float *part) {
    int rows = is_trainer ? ROWS / SEATS : ROWS, columns = is_trainer ? COLUMNS : COLUMNS / SEATS;
    int first_row = is_trainer ? index * rows : 0, first_column = is_trainer ? 0 : index * columns;
    for (int i = 0; is_trainer && i < rows * columns; i++)
        part[i] = value(version, first_row + i / columns, first_column + i % columns);
    tb_client_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    bool ok = is_trainer ? send_version(batch) : tb_client_transfer(batch, false, &opts) == TB_OK;
    tb_client_status status = {.size = sizeof status};
    ok = ok && tb_client_query(batch, &status) == TB_OK;
    if (ok && status.version != (uint64_t)version) {
        tb_error_set(TB_INVALID, "the version has another number");
        return false;
    }
    for (int i = 0; ok && !is_trainer && i < rows * columns; i++) {
        if (part[i] != value(version, first_row + i / columns, first_column + i % columns)) {
            tb_error_set(TB_INVALID, "a wrong element arrived");
            return false;
        }
    }
    return ok;
}

static int run_program(const char *socket) {
    tb_client *client = NULL;
    tb_client_batch *batch = NULL;
    void *memory = NULL;
    tb_client_opts opts = {.size = sizeof opts, .name = "through_agents"};
    if (tb_client_connect(socket, &opts, &client) != TB_OK) {
        fprintf(stderr, "%s\n", tb_error_detail());
        return EXIT_FAILURE;
    }
    int index = tb_client_index(client);
    bool is_trainer = strcmp(tb_client_group(client), "trainer") == 0;
    const char *layout = is_trainer ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    bool ok = tb_client_init_pair(client, "weights", is_trainer ? "inference" : "trainer", layout, TIMEOUT_MS) == TB_OK;
    ok = ok && tb_client_batch_create(client, "step", NULL, &batch) == TB_OK;
    /* Agents use this kind of memory where it is; any other is copied through them. */
    ok = ok && tb_alloc(sizeof(float) * ROWS * COLUMNS / SEATS, &memory) == TB_OK;
    tb_tensor matrix = {.size = sizeof matrix,
                        .data = memory,
                        .dtype = TB_F32,
                        .ndim = 2,
                        .shape = {ROWS, COLUMNS}}; /* the global shape */
    ok = ok && tb_client_batch_add(batch, "weights", "w", &matrix) == TB_OK;
    ok = ok && tb_client_register(batch, TIMEOUT_MS) == TB_OK;
    for (int version = 1; ok && version <= VERSIONS; version++)
        ok = run_version(batch, is_trainer, index, version, memory);
    if (ok)
        printf("%s %d: %d versions, all right\n", tb_client_group(client), index, VERSIONS);
    else
        fprintf(stderr, "%s %d: %s\n", tb_client_group(client), index, tb_error_detail());
    tb_client_batch_destroy(batch);
    tb_client_close(client);
    tb_free(memory);
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- All of it ------------------------------------------------------------------------------------------------- */

typedef struct seat {
    const char *group;
    int index;
    char socket[64];
    pid_t agent, program;
} seat;

/* An agent says one line, when programs may connect. */
static bool start_agent(seat *s, const char *tool, const char *folder) {
    char store[64], rank[16], line[256];
    int said[2];
    snprintf(s->socket, sizeof s->socket, "%s/%s-%d.sock", folder, s->group, s->index);
    snprintf(store, sizeof store, "unix:%s/store", folder);
    snprintf(rank, sizeof rank, "%d", s->index);
    if (pipe(said) != 0)
        return false;
    s->agent = fork();
    if (s->agent == 0) {
        prctl(PR_SET_PDEATHSIG, SIGTERM); /* it must not outlive a parent that is killed */
        dup2(said[1], STDOUT_FILENO);
        close(said[0]);
        close(said[1]);
        execl(tool, tool, "agent", "--name", s->group, "--rank", rank, "--size", "2", "--store", store, "--socket",
              s->socket, (char *)NULL);
        perror(tool);
        _exit(EXIT_FAILURE);
    }
    close(said[1]);
    FILE *stream = fdopen(said[0], "r");
    bool ok = s->agent > 0 && stream && fgets(line, sizeof line, stream);
    if (stream)
        fclose(stream);
    else
        close(said[0]);
    return ok;
}

static bool has_ended_well(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid && status == 0;
}

static int run_all(const char *tool) {
    seat seats[] = {{.group = "trainer"},
                    {.group = "trainer", .index = 1},
                    {.group = "inference"},
                    {.group = "inference", .index = 1}};
    enum { COUNT = sizeof seats / sizeof *seats };
    char folder[] = "/tmp/through_agents-XXXXXX";
    bool ok = mkdtemp(folder);
    for (int i = 0; ok && i < COUNT; i++)
        ok = start_agent(&seats[i], tool, folder);
    for (int i = 0; ok && i < COUNT; i++) {
        seats[i].program = fork();
        if (seats[i].program == 0)
            exit(run_program(seats[i].socket));
        ok = seats[i].program > 0;
    }
    for (int i = 0; i < COUNT; i++) {
        if (seats[i].program > 0)
            ok = has_ended_well(seats[i].program) && ok;
    }
    for (int i = COUNT - 1; i >= 0; i--) { /* the first one serves the store */
        if (seats[i].agent <= 0)
            continue;
        kill(seats[i].agent, SIGTERM);
        ok = has_ended_well(seats[i].agent) && ok;
    }
    ok = rmdir(folder) == 0 && ok; /* agents remove their sockets */
    return ok ? EXIT_SUCCESS : EXIT_FAILURE;
}

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--all") == 0)
        return run_all(argv[2]);
    if (argc == 2)
        return run_program(argv[1]);
    fprintf(stderr, "usage: through_agents SOCKET, or through_agents --all TENSORBUS\n");
    return EXIT_FAILURE;
}
