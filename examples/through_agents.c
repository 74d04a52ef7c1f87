/* Two programs that leave the bus to agents. The trainer has a matrix cut by rows over two processes, the inference
 * engine wants it cut by columns over two others; each of the four talks to an agent of its own, which has its seat.
 * "through_agents SOCKET" is one of the four: which one, the agent tells. "through_agents --all TENSORBUS" starts four
 * agents with that tool, and the four programs. */
#include <tensorbus/tensorbus.h>

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROWS = 600, COLUMNS = 400, SEATS = 2, VERSIONS = 3, TIMEOUT_MS = 20000 };

/* ---- The programs ---------------------------------------------------------------------------------------------- */

static float value(int version, int row, int column) {
    return (float)(row * COLUMNS + column) + (float)version / 4;
}

/* Begins to send, and sleeps until something has come about; a program with other work would do it meanwhile. */
static bool send_version(tb_batch *batch) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_transfer *transfer;
    tb_status status;
    if (tb_send(batch, &opts, &transfer) != TB_OK)
        return false;
    struct pollfd news = {.fd = tb_transfer_fd(transfer), .events = POLLIN};
    while ((status = tb_wait(transfer, TB_COMMITTED, 0)) == TB_TIMEOUT && poll(&news, 1, 2 * TIMEOUT_MS) > 0)
        continue;
    tb_transfer_destroy(transfer);
    return status == TB_OK;
}

static bool receive_version(tb_batch *batch) {
    tb_transfer_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    tb_transfer *transfer;
    if (tb_recv(batch, &opts, &transfer) != TB_OK)
        return false;
    tb_status status = tb_wait(transfer, TB_COMMITTED, -1);
    tb_transfer_destroy(transfer);
    return status == TB_OK;
}

static bool run_version(tb_batch *batch, bool is_trainer, int index, int version, float *part) {
    int rows = is_trainer ? ROWS / SEATS : ROWS, columns = is_trainer ? COLUMNS : COLUMNS / SEATS;
    int first_row = is_trainer ? index * rows : 0, first_column = is_trainer ? 0 : index * columns;
    for (int i = 0; is_trainer && i < rows * columns; i++)
        part[i] = value(version, first_row + i / columns, first_column + i % columns);
    bool ok = is_trainer ? send_version(batch) : receive_version(batch);
    tb_batch_state state = {.size = sizeof state};
    ok = ok && tb_batch_query(batch, &state) == TB_OK;
    if (ok && !is_trainer && state.version != (uint64_t)version) {
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

/* The URL is all that tells an agent from a store; which seat it has, the agent tells. */
static int run_program(const char *socket) {
    tb_world *world = NULL;
    tb_pair *pair = NULL;
    tb_batch *batch = NULL;
    void *memory = NULL;
    char url[128];
    const char *group;
    int32_t index, size;
    tb_world_opts opts = {.size = sizeof opts, .timeout_ms = TIMEOUT_MS};
    snprintf(url, sizeof url, "agent:%s", socket);
    if (tb_world_join(url, NULL, 0, 0, &opts, &world) != TB_OK) {
        fprintf(stderr, "%s\n", tb_error_detail());
        return EXIT_FAILURE;
    }
    tb_world_seat(world, &group, &index, &size);
    bool is_trainer = strcmp(group, "trainer") == 0;
    const char *layout = is_trainer ? "mesh=2 place=Shard(0)" : "mesh=2 place=Shard(1)";
    bool ok = tb_pair_create(world, "weights", is_trainer ? "inference" : "trainer", layout, NULL, &pair) == TB_OK;
    ok = ok && tb_batch_create(world, "step", NULL, &batch) == TB_OK;
    /* Agents use this kind of memory where it is; any other is copied through them. */
    ok = ok && tb_alloc(sizeof(float) * ROWS * COLUMNS / SEATS, &memory) == TB_OK;
    tb_tensor matrix = {.size = sizeof matrix,
                        .data = memory,
                        .dtype = TB_F32,
                        .ndim = 2,
                        .shape = {ROWS, COLUMNS}}; /* the global shape */
    ok = ok && tb_batch_add(batch, pair, "w", &matrix) == TB_OK;
    for (int version = 1; ok && version <= VERSIONS; version++)
        ok = run_version(batch, is_trainer, index, version, memory);
    if (ok)
        printf("%s %d: %d versions, all right\n", group, (int)index, VERSIONS);
    else
        fprintf(stderr, "%s %d: %s\n", group, (int)index, tb_error_detail());
    tb_batch_destroy(batch);
    tb_pair_destroy(pair);
    tb_world_destroy(world);
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
