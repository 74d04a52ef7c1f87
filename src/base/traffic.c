/* The counters of traffic.h. */
#include "base/traffic.h"

tb__traffic tb__traffic_total;
