// The unit for AMX tiles beside AVX-512.
#define RF_AMX
#include "unit.h"

RF_UNIT(kernels_amx)
