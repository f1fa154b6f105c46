// The kernels for any CPU that the compiler targets by default.
#define ISA_NAME "portable"
#include "isa.inc.c"

const struct kernels kernels_portable = KERNELS;
