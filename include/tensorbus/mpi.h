/* A world of the ranks of an MPI communicator. In a separate library for each MPI, because their ABIs differ:
 * libtensorbus-mpi-openmpi, libtensorbus-mpi-mpich. Link it beside libtensorbus, and compile with that MPI's mpicc. */
#ifndef TENSORBUS_MPI_H
#define TENSORBUS_MPI_H

#include "tensorbus/tensorbus.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Makes a world of the communicator's ranks, which become the seats of `group`. All of them have to call
 * it; if it fails on one, it fails on all, with the same error message. They may tb_world_enter other
 * groups, to exchange tensors among themselves. Other programs can't join it.
 *
 * The communicator is duplicated: the caller may go on using it. Destroy the world before MPI_Finalize;
 * otherwise peers that are reached through MPI are lost then, and operations with them fail.
 *
 * In `opts`, `transport` may also be "mpi"; "auto" uses shm between processes of one host, and mpi between
 * hosts. `token` is ignored: a random one is used. MPI must have been initialised with
 * MPI_THREAD_MULTIPLE; for a `manual` world, whose calls all come from the main thread,
 * MPI_THREAD_FUNNELED is enough. */
TB_API tb_status tb_world_from_mpi(MPI_Comm comm, const char *group, const tb_world_opts *opts, tb_world **out);

#ifdef __cplusplus
}
#endif

#endif
