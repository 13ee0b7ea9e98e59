// The unit for AVX-512 with bf16.
#include "unit.h"

RF_UNIT(kernels_avx512)
