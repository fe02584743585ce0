"""tools/check_includes sees each kind of violation, and only those: small trees with one fault each."""
import pathlib
import subprocess
import sys
import tempfile
import unittest

CHECKER = pathlib.Path(__file__).resolve().parents[2] / "tools" / "check_includes"


def check(files):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            path = pathlib.Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run([sys.executable, CHECKER, folder], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout


def header(*includes):
    return "#pragma once\n" + "".join(f"#include {i}\n" for i in includes)


class CheckIncludes(unittest.TestCase):
    def assertFault(self, files, *words):
        code, out = check(files)
        self.assertEqual(code, 1, out)
        self.assertIn("1 violations", out)
        for word in words:
            self.assertIn(word, out)

    def test_legal_tree(self):
        code, out = check({
            "core/json.h": header("<nlohmann/json.hpp>", "<string>"),
            "core/plan.h": header('"core/json.h"'),
            "kernels/cpu/matmul.cpp": "#include <Eigen/Core>\n#include <immintrin.h>\n",
            "traces/trace.h": header('"core/plan.h"', "<zlib.h>"),
            "simulator/engine.cpp": '#include "core/plan.h"\n#include "traces/trace.h"\n#include <thread>\n',
            "executor/comm/mpi.cpp": "#include <mpi.h>\n",
            "executor/cuda/nccl.cpp": "#include <nccl.h>\n#include <cuda_runtime.h>\n",
            "gui/views/timeline.cpp": '#include <QWidget>\n#include "traces/trace.h"\n',
            "cli/main.cpp": '#include <CLI/CLI.hpp>\n#include "core/plan.h"\n',
        })
        self.assertEqual((code, out), (0, "check_includes: 9 files keep the include rules\n"))

    def test_folder_table(self):
        trace = {"traces/trace.h": header(), "executor/trainer.h": header(), "simulator/engine.h": header()}
        self.assertFault({**trace, "core/plan.cpp": '\n#include "traces/trace.h"\n'}, "core/plan.cpp:2:", "traces/trace.h")
        self.assertFault({**trace, "executor/x.cpp": '#include "simulator/engine.h"\n'}, "core, kernels, traces")
        self.assertFault({**trace, "gui/x.cpp": '#include "executor/trainer.h"\n'}, "gui/ includes")
        self.assertFault({"core/a.h": header(), "kernels/cpu/x.cpp": '#include "core/a.h"\n'}, "nothing else of ours")

    def test_outside_libraries(self):
        self.assertFault({"core/plan.cpp": "#include <nlohmann/json.hpp>\n"}, "core/json.h")
        self.assertFault({"cli/x.cpp": "#include <mpi.h>\n"}, "MPI")
        self.assertFault({"executor/x.cpp": "#include <cuda_runtime.h>\n"}, "CUDA")
        self.assertFault({"executor/comm/x.cpp": "#include <nccl.h>\n"}, "NCCL")
        self.assertFault({"cli/x.cpp": "#include <QtCore/QString>\n"}, "Qt")
        self.assertFault({"core/x.cpp": "#include <mutex>\n"}, "threads")
        self.assertFault({"core/x.cpp": "#include <unheard/of.h>\n"}, "of no library")

    def test_form(self):
        self.assertFault({"core/a.h": "int x;\n"}, "#pragma once")
        self.assertFault({"core/a.cpp": '#include "b.h"\n', "core/b.h": header()}, "no file of ours")
        self.assertFault({"core/a.h": header('"core/b.h"'), "core/b.h": header('"core/a.h"')}, "cycle")

    def test_empty_tree_is_no_pass(self):
        self.assertEqual(check({"README.md": ""})[0], 1)


if __name__ == "__main__":
    unittest.main()
