#define ECHELON_ISA_NAMESPACE isa_avx2
#define ECHELON_ISA_NAME "avx2"
#include "update.inc"
