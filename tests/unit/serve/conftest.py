import sys
from pathlib import Path

# Test files are imported by their place, not by name; those that share a helper find it here.
sys.path.insert(0, str(Path(__file__).parent))
