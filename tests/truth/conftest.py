import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))      # scenarios.py and table.py lie beside the tests
