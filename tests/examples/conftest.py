import sys
from pathlib import Path

# The examples are scripts and import each other as siblings: `python examples/demo.py` puts their folder on the path.
sys.path.append(str(Path(__file__).parents[2] / "examples"))
