// The processor's matrix unit (AMX): sixteen rows at a time, whether they are all wanted or not.
//
// One instruction multiplies 16 rows of 32 bfloat16 with 32 x 16 bfloat16 and adds to 16 x 16 sums. A row's sums
// depend on that row alone, and there is one instruction for every number of rows, so row invariance holds by
// construction: a lone row travels with fifteen of zeros, which costs nothing where memory is what is waited for.
//
// The words of the other variants (two bfloat16 side by side) are just what the unit wants, so the layouts of
// weights, keys and values are the same. The unit's own sums differ from the vector instructions' in rounding.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__AMX_BF16__)

namespace longdraft::LONGDRAFT_VARIANT::amx {

constexpr int ROWS = 16;   // of a tile
constexpr int INNER = 32;  // bfloat16 that one instruction sums over

// Tile registers: four sums, two left operands and a right one.
enum Tile { SUM = 0, LEFT = 4, RIGHT = 6 };

// The unit set up for this thread, and put to rest again: a thread with live tiles is dear to switch away from.
class Unit {
  public:
    Unit() {
        struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {};
        shape.palette = 1;
        for (int t = 0; t < 8; t++) {
            shape.bytes[t] = 2 * INNER;
            shape.rows[t] = ROWS;
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Unit() { asm volatile("tilerelease" ::: "memory"); }
    Unit(const Unit&) = delete;
};

// Strides are in bytes; with a stride of 0 all rows of the tile are the same row.
template <int TILE> void load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> void store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int SUMS, int A, int B> void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

inline void prefetch(const uint32_t* from, int lines, long stride) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * stride);
}

// The four sums, or some of them, one after the other: f(std::integral_constant) for each.
template <int WIDE, class F> void each(F f) {
    if constexpr (WIDE > 1) each<WIDE - 1>(f);
    f(std::integral_constant<int, WIDE - 1>{});
}

}  // namespace

#endif
