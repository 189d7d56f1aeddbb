// Calls of one loaded library to functions of others, led elsewhere: its table of addresses is changed, and nothing else of it or of anybody.
#pragma once

#include <string>
#include <vector>

#include "blocks.h"

namespace echelon {

struct Detour {
    std::string name;  // of the function that is called
    void* to;          // where calls go from now on
};

// True when every one of these is called by the library whose file begins with `library`, all of them lead into the C library now, and they were
// led elsewhere. Otherwise nothing is changed: another allocator may be there already.
bool reroute(const std::string& library, const std::vector<Detour>& detours);

// Large blocks of `library`, which gets and frees memory by posix_memalign and free, come from Blocks from now on. False where that
// cannot be: another system or allocator, addresses that are limited (ulimit -v, strict overcommit).
bool block_memory_of(const std::string& library);

Blocks* blocks();  // nullptr while block_memory_of was not called, or gave false

}  // namespace echelon
