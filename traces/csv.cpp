#include "traces/csv.h"

#include <fmt/format.h>

#include <algorithm>

#include "core/json.h"

namespace bmt::trace {

int CsvTable::column(const std::string& name) const {
  const auto at = std::find(columns.begin(), columns.end(), name);
  return at == columns.end() ? -1 : static_cast<int>(at - columns.begin());
}

std::string CsvTable::at(std::size_t row, const std::string& name) const {
  const int index = column(name);
  if (index < 0) return {};
  const std::string& field = rows[row][static_cast<std::size_t>(index)];
  const std::size_t first = field.find_first_not_of(" \t");
  if (first == std::string::npos) return {};
  return field.substr(first, field.find_last_not_of(" \t") - first + 1);
}

CsvTable parseCsv(const std::string& text, const std::string& source) {
  CsvTable table;
  table.source = source;
  std::vector<std::string> row;
  std::string field;
  bool quoted = false, any = false;
  int line = 1, row_line = 1;
  const auto endRow = [&] {
    row.push_back(std::move(field));
    field.clear();
    if (row.size() > 1 || any) {
      if (table.columns.empty()) {
        table.columns = row;
      } else if (row.size() != table.columns.size()) {
        throw Error(ErrorKind::BadInput,
                    fmt::format("line {}: {} fields, but the header names {}", row_line, row.size(),
                                table.columns.size()),
                    source);
      } else {
        table.rows.push_back(row);
        table.lines.push_back(row_line);
      }
    }
    row.clear();
    any = false;
  };
  for (std::size_t i = text.starts_with("\xEF\xBB\xBF") ? 3 : 0; i < text.size(); ++i) {
    const char c = text[i];
    if (c == '\n') ++line;
    if (quoted) {
      if (c != '"') {
        field += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        field += text[++i];
      } else {
        quoted = false;
      }
      continue;
    }
    if (c == '"' && field.empty()) {
      quoted = any = true;
    } else if (c == ',') {
      row.push_back(std::move(field));
      field.clear();
    } else if (c == '\n') {
      endRow();
      row_line = line;
    } else if (c != '\r') {
      field += c;
      any = true;
    }
  }
  if (quoted)
    throw Error(ErrorKind::BadInput, fmt::format("line {}: a quote is never closed", row_line), source);
  if (any || !row.empty()) endRow();
  if (table.columns.empty())
    throw Error(ErrorKind::BadInput, "is empty; expected a line of column names", source);
  return table;
}

CsvTable readCsv(const std::string& path) {
  return parseCsv(readFile(path), path);
}

}  // namespace bmt::trace
