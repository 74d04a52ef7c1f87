/* Copies that do arithmetic, a tile at a time. */
#ifndef TB_EXEC_TILE_H
#define TB_EXEC_TILE_H

#include "exec/copy.h"

/* A part of a copy, neither of them empty, that casts or reduces. */
void tb__tiles_run(const tb__copy *copy, tb__part part, bool stream);

#endif
