#include "variants.h"

#if defined(LONGDRAFT_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(LONGDRAFT_AVXVNNI)
#include <cpuid.h>
#endif
#if defined(LONGDRAFT_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(LONGDRAFT_ARM)
#include <sys/auxv.h>
#endif

namespace longdraft {

#define VARIANT(name) namespace name { extern const Kernels table; }
#if defined(LONGDRAFT_AMX)
VARIANT(amx)
#endif
#if defined(LONGDRAFT_X86)
VARIANT(avx512bf16)
VARIANT(avx512vnni)
#if defined(LONGDRAFT_AVXVNNI)
VARIANT(avxvnni)
#endif
VARIANT(avx2)
#endif
#if defined(LONGDRAFT_ARM)
VARIANT(neon_bf16)
VARIANT(neon)
VARIANT(armv8)
#else
VARIANT(portable)
#endif
#undef VARIANT

namespace {

#if defined(LONGDRAFT_AMX)
// Linux grants the use of the matrix unit's registers to a process after one request.
bool may_use_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    static const bool is_granted = __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
                                   syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return is_granted;
}
#endif

#if defined(LONGDRAFT_AVXVNNI)
// Compilers learned its name in __builtin_cpu_supports later than its instructions.
bool has_avxvnni() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(LONGDRAFT_ARM)
// Instructions that the system allows: Linux hides those that a processor has with a fault.
struct ArmFeatures { bool dot, bf16, i8mm; };
ArmFeatures arm_features() {
#if defined(__APPLE__)
    auto has = [](const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;  // an unknown name: an older system
    };
    return {has("hw.optional.arm.FEAT_DotProd"), has("hw.optional.arm.FEAT_BF16"), has("hw.optional.arm.FEAT_I8MM")};
#else
    constexpr int ASIMDDP = 20, I8MM = 13, BF16 = 14;  // bits that older headers do not name
    const unsigned long first = getauxval(AT_HWCAP), second = getauxval(AT_HWCAP2);
    return {(first >> ASIMDDP & 1) != 0, (second >> BF16 & 1) != 0, (second >> I8MM & 1) != 0};
#endif
}
#endif

}  // namespace

std::vector<const Kernels*> runnable() {
    std::vector<const Kernels*> found;
#if defined(LONGDRAFT_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
        const bool has_bf16 = __builtin_cpu_supports("avx512bf16");
#if defined(LONGDRAFT_AMX)
        if (has_bf16 && may_use_tiles()) found.push_back(&amx::table);
#endif
        if (has_bf16) found.push_back(&avx512bf16::table);
        found.push_back(&avx512vnni::table);
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
#if defined(LONGDRAFT_AVXVNNI)
        if (has_avxvnni()) found.push_back(&avxvnni::table);
#endif
        found.push_back(&avx2::table);
    }
#endif
#if defined(LONGDRAFT_ARM)
    const ArmFeatures has = arm_features();
    if (has.dot && has.bf16 && has.i8mm) found.push_back(&neon_bf16::table);
    if (has.dot) found.push_back(&neon::table);
    found.push_back(&armv8::table);
#else
    found.push_back(&portable::table);
#endif
    return found;
}

}  // namespace longdraft
