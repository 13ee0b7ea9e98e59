// The unit for any processor.
#include "unit.h"

RF_UNIT(kernels_portable)
