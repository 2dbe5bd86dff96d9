"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   parameter: [1, 2] = input
#   other: [1, 2] = input
#   v: [1, 2] = input
#   copy_ = copy_(parameter, v)
#   copy__1 = copy_(parameter, other)
#   sin: [1, 2] = sin(parameter)
#   resize_storage_bytes_ = resize_storage_bytes_(parameter, 0)
#   return sin

PASS = 'tests.mutants.overlap_fsdp:CopyBeyondItsInterval'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'collective_order': True,
}
KIND = 'wrong-value'
DOMAIN = 'float64'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":2,"dims":[{"name":"tp","groups":[[0,1]'
    ']}]},"inputs":[{"name":"parameter","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"kind":'
    '"uniform","scale":1.0}},{"name":"other","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"k'
    'ind":"uniform","scale":1.0}},{"name":"v","shape":[1,2],"dtype":"float32","placements":[],"recipe":{"'
    'kind":"uniform","scale":1.0}}],"graphs":[{"nodes":[{"name":"parameter","op":"placeholder","target":"'
    '","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"other","op":"'
    'placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":1}}'
    ',{"name":"v","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"f'
    'loat32","alias":2}},{"name":"copy_","op":"call_function","target":"fsdp::copy_","args":[{"node":"par'
    'ameter"},{"node":"v"}],"val":{"scalar":null}},{"name":"copy__1","op":"call_function","target":"fsdp:'
    ':copy_","args":[{"node":"parameter"},{"node":"other"}],"val":{"scalar":null}},{"name":"sin","op":"ca'
    'll_function","target":"aten::sin","args":[{"node":"parameter"}],"val":{"shape":[1,2],"stride":[2,1],'
    '"dtype":"float32","alias":3}},{"name":"resize_storage_bytes_","op":"call_function","target":"inducto'
    'r::resize_storage_bytes_","args":[{"node":"parameter"},0],"val":{"scalar":null}},{"name":"output","o'
    'p":"output","target":"","args":[{"node":"sin"}]}]}],"ranks":[{"graph":0,"constants":{}},{"graph":0,"'
    'constants":{}}],"seed":0,"labels":[]}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
