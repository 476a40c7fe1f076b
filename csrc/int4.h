// Quantising a weight to int4. longdraft/kernels/formats/int4.py defines the numbers, groups.h multiplies with them.
#pragma once

#include "groups.h"

#include <iterator>

namespace longdraft::LONGDRAFT_VARIANT::int4 {

using namespace groups;

// How a group of 32 float32 weights is quantised with one clipping ratio.
struct Clipping {
    uint16_t half;  // the step as float16
    float step;
    Floats zero;    // the same in all lanes

    Clipping(float least, float width, float ratio) : half(to_half(width * ratio / 15.0f)), step(from_half(half)) {
        zero = step > 0 ? clamp(nearest(broadcast(-(least * ratio) / step))) : Floats{};
    }

    // 0 to 15 as floats. The quotient is clamped before it is rounded as well: `nearest` is right for small numbers only.
    Floats values(Floats weights) const {
        Floats quotient = step > 0 ? weights / step : Floats{};
        quotient = select(quotient < -16.0f, broadcast(-16.0f), quotient);
        quotient = select(quotient > 16.0f, broadcast(16.0f), quotient);
        return clamp(nearest(quotient) + zero);
    }

    float squared_error(Floats low, Floats high) const {
        const Floats first = (values(low) - zero) * step - low, second = (values(high) - zero) * step - high;
        return sum(first * first + second * second);
    }

  private:
    static Floats nearest(Floats x) { return (x + broadcast(12582912.0f)) - broadcast(12582912.0f); }
    static Floats clamp(Floats x) {
        x = select(x < 0.0f, Floats{}, x);
        return select(x > 15.0f, broadcast(15.0f), x);
    }
};

constexpr float RATIOS[] = {1.0f, 0.95f, 0.9f, 0.85f, 0.8f, 0.75f};  // of a group's range, tried in this order

// A weight [n, k] to values [n, k], scales (float16) and zero points [n, groups].
template <class T> void quantise(const void* weight, long n, long k, uint8_t* values, uint16_t* scales, uint8_t* zeros) {
    const long groups = round_up(k, GROUP) / GROUP;
    auto* in = static_cast<const typename T::Element*>(weight);
    parallel(n, [&](long row) {
        for (long g = 0; g < groups; g++) {
            const long count = std::min<long>(GROUP, k - g * GROUP), at = row * groups + g;
            uint8_t* out = values + row * k + g * GROUP;
            typename T::Element group[GROUP] = {};
            std::copy_n(in + row * k + g * GROUP, count, group);
            const Floats low = T::widen(group), high = T::widen(group + LANES);
            if (const float damage = sum((low - low) + (high - high)); !(damage == 0)) {
                std::fill_n(out, count, 0);
                scales[at] = 0x7e00;  // NaN: damaged weights must not become plausible text
                zeros[at] = 0;
                continue;
            }
            const float most = std::max(0.0f, max(max(low, high))), least = std::min(0.0f, -max(max(-low, -high)));
            Clipping best(least, most - least, RATIOS[0]);
            float error = best.squared_error(low, high);
            for (size_t i = 1; i < std::size(RATIOS); i++) {
                const Clipping tried(least, most - least, RATIOS[i]);
                const float found = tried.squared_error(low, high);
                if (found < error) error = found, best = tried;
            }
            const Floats parts[2] = {best.values(low), best.values(high)};
            for (long i = 0; i < count; i++) out[i] = static_cast<uint8_t>(parts[i / LANES][i % LANES]);
            scales[at] = best.half;
            zeros[at] = static_cast<uint8_t>(best.zero[0]);
        }
    });
}

}  // namespace
