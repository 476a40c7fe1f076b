// What a persistent kernel could reach: each program streams its own part of the weights through a ring of shared
// memory, and all programs meet at barriers between the phases of a layer. There is no arithmetic but a sum of bits.
//
// Copies are issued STAGES - 1 chunks ahead, across barriers, so memory does not idle while programs wait for each
// other. Each thread reads only what it copied itself, so a chunk needs no barrier of its program.
//
// The test of this file compiles it with g++ and a shim (tests/helpers/cuda_shim.h), where a copy arrives at the wait.

#ifndef CUDA_SHIM
__device__ void copy_ahead(void* to, const void* from) {
    unsigned shared = static_cast<unsigned>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}
__device__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ void wait_for_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }
__device__ void arrive(unsigned* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ unsigned arrived(const unsigned* counter) {
    unsigned count;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    return count;
}
__device__ long long now() { return clock64(); }
#endif

#ifndef STAGES
#define STAGES 24  // of 16 bytes for each of 512 threads: 192 KiB
#endif

struct alignas(16) Chunk { unsigned words[4]; };

// weights   chunks of all programs: [programs, phases * chunks, threads]
// chunks    of a phase, of one program
// counter   programs that arrived at barriers, 0 at first; it is never reset
// sums      [programs, threads]
// failed    is set where a program waited for others for more than `patience` clock ticks
extern "C" __global__ void ring(const Chunk* weights, unsigned* counter, unsigned* sums, unsigned* failed,
                                int patience, int chunks, int phases, int has_barriers) {
    extern __shared__ Chunk held[];
    const int threads = blockDim.x, total = chunks * phases;
    const Chunk* own = weights + (static_cast<long long>(blockIdx.x) * total) * threads + threadIdx.x;
    Chunk* slots = held + threadIdx.x;
    for (int chunk = 0; chunk < STAGES - 1; ++chunk) {
        if (chunk < total) copy_ahead(slots + chunk * threads, own + static_cast<long long>(chunk) * threads);
        end_group();
    }
    unsigned sum = 0;
    for (int phase = 0, chunk = 0; phase < phases; ++phase) {
        for (int end = chunk + chunks; chunk < end; ++chunk) {
            wait_for_groups<STAGES - 2>();
            const Chunk read = slots[chunk % STAGES * threads];
            const int ahead = chunk + STAGES - 1;
            if (ahead < total)
                copy_ahead(slots + ahead % STAGES * threads, own + static_cast<long long>(ahead) * threads);
            end_group();
            sum += read.words[0] ^ read.words[1] ^ read.words[2] ^ read.words[3];
        }
        if (has_barriers) {
            __syncthreads();
            if (threadIdx.x == 0) {
                arrive(counter);
                const long long began = now();
                while (arrived(counter) < static_cast<unsigned>(phase + 1) * gridDim.x) {
                    if (now() - began > patience) {
                        *failed = 1;
                        break;
                    }
                }
            }
            __syncthreads();
        }
    }
    sums[blockIdx.x * threads + threadIdx.x] = sum;
}
