"""python -m tcverify"""

from tcverify.cli import main

main()
