// The unit for AVX2 with FMA.
#include "unit.h"

RF_UNIT(kernels_avx2)
