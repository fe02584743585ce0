// "Did you mean": the candidate nearest to what the user typed.
#pragma once

#include <string>
#include <vector>

namespace bmt {

// Smallest edit distance (Levenshtein 1966), first in order among equals; empty when there are no candidates.
std::string nearestName(const std::string& text, const std::vector<std::string>& candidates);

}  // namespace bmt
