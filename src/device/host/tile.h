/* Copies that do arithmetic, a tile at a time. */
#ifndef TB_DEVICE_HOST_TILE_H
#define TB_DEVICE_HOST_TILE_H

#include "device/host/move.h"

/* A part of a copy, neither of them empty, that casts or reduces. */
void tb__tiles_run(const tb__move *copy, tb__move_share part, bool stream);

#endif
