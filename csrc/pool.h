// Our own few threads: they wait a moment for the next piece of work, then sleep. Results never depend on them.
#pragma once

#include <functional>

namespace longdraft {

int threads();
void set_threads(int count);

// Run work(0) .. work(count - 1), in any order, on all threads; returns when all are done.
void parallel(long count, const std::function<void(long)>& work);

}  // namespace longdraft
