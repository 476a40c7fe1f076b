// Writing weights of whole numbers in groups to tiles: from numbers, and from the quantised blocks of GGUF files.
#pragma once

#include "layout.h"

namespace longdraft {

// The parts of a weight [n, k] with G groups, as longdraft/kernels/formats/groups.py and int4.py have them.
struct GroupParts {
    const uint8_t* values;  // [n, k] codes
    const void* scales;     // [n, G] or [n, G, 2]: float16, or whole numbers of 8 bits with common scales
    const void* besides;    // [n, G]: zero points (uint8) or least values (as scales); null: neither
    const uint16_t* common; // [n, G / 8], or [n, G / 8, 2] with least values; null: there are none
};

void pack_groups(Linear& w, const GroupParts& parts);

// The encoding that holds rows in these types of llama.cpp (ggml.h); NONE for a type that groups cannot hold.
Groups encoding_of(const uint8_t* types, long rows);

// Rows of blocks, each at its own address and of its own type, to the tiles of a weight with that encoding. Returns the
// first row with a scale that is not finite; -1: there is none.
long pack_blocks(Linear& w, const uint8_t* const* rows, const uint8_t* types);

}  // namespace longdraft
