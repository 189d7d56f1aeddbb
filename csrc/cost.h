// Which way an operation goes between hosts: what each would take, and the cheapest. Pure.
//
// Every rank must choose alike, so the numbers are measured by one rank and told to all. The choice never changes bits: all
// ways add up in the order of ranks.
#pragma once

#include <stdint.h>

#include "types.h"

namespace echelon {

struct Costs {
    double alpha = 60e-6;     // seconds from a send to its arrival, nothing else on the way
    double beta = 1.0 / 1e9;  // seconds a byte, through one host's link in one direction
    double each = 8e-6;       // seconds that one more frame costs the processor
};

enum class Way : uint8_t {
    flat,    // everybody to everybody (or to the root, or from it) at once
    bruck,   // doubling: log2(n) rounds
    slices,  // each rank is in charge of a share: scattered, then gathered
    tree,    // from the root, who has it passes it on
};
const char* name_of(Way way);

// Seconds; negative where there is no such way.
double cost(Way way, Kind kind, uint64_t bytes, int size, const Costs& costs);
Way cheapest(Kind kind, uint64_t bytes, int size, const Costs& costs);

}  // namespace echelon
