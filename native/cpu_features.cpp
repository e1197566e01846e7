#include "cpu_features.h"

#include <stdexcept>

namespace noria {

namespace generic {
extern const KernelTable kTable;
}
#if defined(NORIA_X86_TIERS)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
namespace avx512bf16 {
extern const KernelTable kTable;
}
#endif

namespace {

std::vector<const KernelTable*> available() {
  std::vector<const KernelTable*> tables{&generic::kTable};
#if defined(NORIA_X86_TIERS)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2) tables.push_back(&avx2::kTable);
  if (avx512) tables.push_back(&avx512::kTable);
  if (avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) tables.push_back(&avx512bf16::kTable);
#endif
  return tables;
}

}  // namespace

std::vector<std::string> available_tiers() {
  std::vector<std::string> names;
  for (const KernelTable* table : available()) names.emplace_back(table->name);
  return names;
}

const KernelTable& kernels_of(const std::string& tier) {
  const std::vector<const KernelTable*> tables = available();
  if (tier == "auto") return *tables.back();
  std::string names;
  for (const KernelTable* table : tables) {
    if (tier == table->name) return *table;
    names += (names.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::invalid_argument("cpu_tier '" + tier + "' is not available on this machine: choose auto or one of " + names);
}

}  // namespace noria
