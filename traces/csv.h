// Comma-separated tables as spreadsheets write them (RFC 4180): quoted fields, doubled quotes, line breaks
// inside quotes; the first line names the columns.
#pragma once

#include <string>
#include <vector>

namespace bmt::trace {

struct CsvTable {
  std::string source;  // file name, for messages
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;  // each as long as `columns`
  std::vector<int> lines;                      // first line of each row in the file

  int column(const std::string& name) const;  // -1 = none
  // The field, without surrounding blanks; empty when the table has no such column.
  std::string at(std::size_t row, const std::string& name) const;
};

// Throw Error{BadInput} with file and line: a row of another length, an open quote, no header.
CsvTable parseCsv(const std::string& text, const std::string& source);
CsvTable readCsv(const std::string& path);

}  // namespace bmt::trace
