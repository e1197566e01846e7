// Which kernels this machine can run.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace noria {

// Tiers that this build holds and this CPU can run, the best last.
std::vector<std::string> available_tiers();

// The table of a tier by name, or of the best one for "auto". Throws std::invalid_argument, naming the available ones.
const KernelTable& kernels_of(const std::string& tier);

}  // namespace noria
