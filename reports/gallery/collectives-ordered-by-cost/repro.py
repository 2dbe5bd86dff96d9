"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

from tcverify import loads
from tcverify.replay import reproduce

# The original program as rank 0 runs it:
#
#   x: [1, 2] = input
#   w: [2, 2] = input
#   w_1: [2, 2] = input
#   all_reduce: [1, 2] = all_reduce(x, 0, [0, 2])
#   matmul: [1, 2] = matmul(x, w)
#   matmul_all_reduce: [1, 2] = matmul_all_reduce(x, w_1, None, 0, [0, 1])
#   abs_1: [1, 2] = abs(all_reduce)
#   cat: [3, 2] = cat([matmul_all_reduce, w_1], 0)
#   matmul_1: [3, 2] = matmul(cat, w)
#   return (matmul_1, matmul, abs_1)

PASS = 'tests.mutants.multistream:CostsOrderCollectives'
OPTIONS = {}
CONTRACT = {
    'idempotent': True,
    'metadata': True,
    'identity': False,
    'schedule': True,
    'overlap': True,
    'boundary': 'strict',
    'inputs': 'ready',
}
KIND = 'deadlock'
DEEP = False
PASS_TIMEOUT = 20.0
PROGRAM = (
    '{"format":"tcverify-program","version":1,"mesh":{"world_size":4,"dims":[{"name":"dp","groups":[[0,2]'
    ',[1,3]]},{"name":"tp","groups":[[0,1],[2,3]]}]},"inputs":[{"name":"x","shape":[1,2],"dtype":"float32'
    '","placements":[["tp","partial(sum)"]],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w","shape":'
    '[2,2],"dtype":"float32","placements":[],"recipe":{"kind":"uniform","scale":1.0}},{"name":"w_1","shap'
    'e":[2,2],"dtype":"float32","placements":[["tp","varying"]],"recipe":{"kind":"uniform","scale":1.0}}]'
    ',"graphs":[{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stri'
    'de":[2,1],"dtype":"float32","alias":0}},{"name":"w","op":"placeholder","target":"","args":[],"val":{'
    '"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"w_1","op":"placeholder","target"'
    ':"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"all_reduce"'
    ',"op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank'
    '"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{'
    '"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args":[{"node":"x"},'
    '{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-0'
    '6}},{"name":"matmul_all_reduce","op":"call_function","target":"tensor_cast::matmul_all_reduce","args'
    '":[{"node":"x"},{"node":"w_1"},null,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":'
    '[1,2],"stride":[2,1],"dtype":"float32","alias":5},"meta":{"cost_s":1e-06}},{"name":"abs_1","op":"cal'
    'l_function","target":"aten::abs","args":[{"node":"all_reduce"}],"val":{"shape":[1,2],"stride":[2,1],'
    '"dtype":"float32","alias":6},"meta":{"cost_s":4e-05}},{"name":"cat","op":"call_function","target":"t'
    'ensor_cast::cat","args":[[{"node":"matmul_all_reduce"},{"node":"w_1"}],0],"val":{"shape":[3,2],"stri'
    'de":[2,1],"dtype":"float32","alias":7},"meta":{"cost_s":2.158e-06}},{"name":"matmul_1","op":"call_fu'
    'nction","target":"aten::matmul","args":[{"node":"cat"},{"node":"w"}],"val":{"shape":[3,2],"stride":['
    '2,1],"dtype":"float32","alias":8},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"'
    '","args":[{"tuple":[{"node":"matmul_1"},{"node":"matmul"},{"node":"abs_1"}]}]}]},{"nodes":[{"name":"'
    'x","op":"placeholder","target":"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","a'
    'lias":0}},{"name":"w","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"'
    'dtype":"float32","alias":1}},{"name":"w_1","op":"placeholder","target":"","args":[],"val":{"shape":['
    '2,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"all_reduce","op":"call_function","target"'
    ':"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"va'
    'l":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"matm'
    'ul","op":"call_function","target":"aten::matmul","args":[{"node":"x"},{"node":"w"}],"val":{"shape":['
    '1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"cost_s":1e-06}},{"name":"matmul_all_reduce'
    '","op":"call_function","target":"tensor_cast::matmul_all_reduce","args":[{"node":"x"},{"node":"w_1"}'
    ',null,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"'
    'float32","alias":5},"meta":{"cost_s":1e-06}},{"name":"abs_1","op":"call_function","target":"aten::ab'
    's","args":[{"node":"all_reduce"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":6},"'
    'meta":{"cost_s":2e-05}},{"name":"cat","op":"call_function","target":"tensor_cast::cat","args":[[{"no'
    'de":"matmul_all_reduce"},{"node":"w_1"}],0],"val":{"shape":[3,2],"stride":[2,1],"dtype":"float32","a'
    'lias":7},"meta":{"cost_s":1.22e-05}},{"name":"matmul_1","op":"call_function","target":"aten::matmul"'
    ',"args":[{"node":"cat"},{"node":"w"}],"val":{"shape":[3,2],"stride":[2,1],"dtype":"float32","alias":'
    '8},"meta":{"cost_s":1e-05}},{"name":"output","op":"output","target":"","args":[{"tuple":[{"node":"ma'
    'tmul_1"},{"node":"matmul"},{"node":"abs_1"}]}]}]},{"nodes":[{"name":"x","op":"placeholder","target":'
    '"","args":[],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"w","op":"pla'
    'ceholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"'
    'name":"w_1","op":"placeholder","target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"fl'
    'oat32","alias":2}},{"name":"all_reduce","op":"call_function","target":"tensor_cast::all_reduce","arg'
    's":[{"node":"x"},{"rank_constant":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1'
    '],"dtype":"float32","alias":3},"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","targe'
    't":"aten::matmul","args":[{"node":"x"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"fl'
    'oat32","alias":4},"meta":{"cost_s":1e-06}},{"name":"matmul_all_reduce","op":"call_function","target"'
    ':"tensor_cast::matmul_all_reduce","args":[{"node":"x"},{"node":"w_1"},null,{"rank_constant":"rank"},'
    '{"rank_constant":"tp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5},"meta":{"co'
    'st_s":1e-06}},{"name":"abs_1","op":"call_function","target":"aten::abs","args":[{"node":"all_reduce"'
    '}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":6},"meta":{"cost_s":6e-06}},{"name"'
    ':"cat","op":"call_function","target":"tensor_cast::cat","args":[[{"node":"matmul_all_reduce"},{"node'
    '":"w_1"}],0],"val":{"shape":[3,2],"stride":[2,1],"dtype":"float32","alias":7},"meta":{"cost_s":4.187'
    'e-06}},{"name":"matmul_1","op":"call_function","target":"aten::matmul","args":[{"node":"cat"},{"node'
    '":"w"}],"val":{"shape":[3,2],"stride":[2,1],"dtype":"float32","alias":8},"meta":{"cost_s":1e-05}},{"'
    'name":"output","op":"output","target":"","args":[{"tuple":[{"node":"matmul_1"},{"node":"matmul"},{"n'
    'ode":"abs_1"}]}]}]},{"nodes":[{"name":"x","op":"placeholder","target":"","args":[],"val":{"shape":[1'
    ',2],"stride":[2,1],"dtype":"float32","alias":0}},{"name":"w","op":"placeholder","target":"","args":['
    '],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":1}},{"name":"w_1","op":"placeholder"'
    ',"target":"","args":[],"val":{"shape":[2,2],"stride":[2,1],"dtype":"float32","alias":2}},{"name":"al'
    'l_reduce","op":"call_function","target":"tensor_cast::all_reduce","args":[{"node":"x"},{"rank_consta'
    'nt":"rank"},{"rank_constant":"dp"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":3}'
    ',"meta":{"cost_s":1e-06}},{"name":"matmul","op":"call_function","target":"aten::matmul","args":[{"no'
    'de":"x"},{"node":"w"}],"val":{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":4},"meta":{"cos'
    't_s":1e-05}},{"name":"matmul_all_reduce","op":"call_function","target":"tensor_cast::matmul_all_redu'
    'ce","args":[{"node":"x"},{"node":"w_1"},null,{"rank_constant":"rank"},{"rank_constant":"tp"}],"val":'
    '{"shape":[1,2],"stride":[2,1],"dtype":"float32","alias":5},"meta":{"cost_s":1e-06}},{"name":"abs_1",'
    '"op":"call_function","target":"aten::abs","args":[{"node":"all_reduce"}],"val":{"shape":[1,2],"strid'
    'e":[2,1],"dtype":"float32","alias":6},"meta":{"cost_s":6e-06}},{"name":"cat","op":"call_function","t'
    'arget":"tensor_cast::cat","args":[[{"node":"matmul_all_reduce"},{"node":"w_1"}],0],"val":{"shape":[3'
    ',2],"stride":[2,1],"dtype":"float32","alias":7},"meta":{"cost_s":7.16e-06}},{"name":"matmul_1","op":'
    '"call_function","target":"aten::matmul","args":[{"node":"cat"},{"node":"w"}],"val":{"shape":[3,2],"s'
    'tride":[2,1],"dtype":"float32","alias":8},"meta":{"cost_s":1e-06}},{"name":"output","op":"output","t'
    'arget":"","args":[{"tuple":[{"node":"matmul_1"},{"node":"matmul"},{"node":"abs_1"}]}]}]}],"ranks":[{'
    '"graph":0,"constants":{"rank":0,"dp":[0,2],"tp":[0,1]}},{"graph":1,"constants":{"rank":1,"dp":[1,3],'
    '"tp":[0,1]}},{"graph":2,"constants":{"rank":2,"dp":[0,2],"tp":[2,3]}},{"graph":3,"constants":{"rank"'
    ':3,"dp":[1,3],"tp":[2,3]}}],"seed":0,"labels":["layers=0","bsh","bf16","mixed-dtypes","two-groups","'
    'reordered","extra-outputs","overlap","branches=2","all-reduce","binary","cast","cat","fused-norm","f'
    'used-reduce","index","marker","matmul","reduce-scatter","transpose","unary","timed","rank-dependent-'
    'costs"],"streams":{"compute":[0],"comm":[1],"sync_overhead_s":0.0,"device":null}}'
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, deep=DEEP, pass_timeout=PASS_TIMEOUT)
    )
