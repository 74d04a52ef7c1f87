/* Memory of another process that can't be mapped, but read: by a system call, or by a transport. */
#ifndef TB_DEVICE_HOST_READER_H
#define TB_DEVICE_HOST_READER_H

#include "device/device.h"
#include "tensorbus/transport.h"

/* Reads ranges of the memory to `to`, one after the other. Any thread. */
typedef tb_status tb__host_read_fn(void *arg, const tb_range *ranges, size_t nranges, void *to, size_t nbytes);

/* A mapping for moves of the host device. The caller frees it by tb__host_unmap_reader. NULL: no memory. */
tb__mapping *tb__host_map_reader(size_t nbytes, tb__host_read_fn *read, void *arg);
void tb__host_unmap_reader(tb__mapping *mapping);

#endif
