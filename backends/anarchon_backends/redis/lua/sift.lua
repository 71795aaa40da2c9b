-- Which runs may be wanted, of the next ones down an index: a field or two tell of most that they are not,
-- and those need not be sent. It only reads. KEYS[1] is the index; ARGV[1] the question as JSON (`_sieve.py`).

local index, asked = KEYS[1], cjson.decode(ARGV[1])

-- A member is a slot, and in an index of all jobs the job besides.
local function key_of(member)
  local slot, job = string.match(member, '^(%d+) (.*)$')
  return asked.begin .. (slot and job .. '}:' .. slot or member)
end

-- Who reads a run in which a field cannot be read says what is wrong with it.
local function may_be_in(key)
  local state = redis.pcall('HGET', key, 'state')
  return asked.states[state] or (type(state) == 'table' and state.err)
end

-- Its earlier attempts may have been anybody's.
local function may_be_by(key)
  local by = redis.pcall('HMGET', key, 'instance_id', 'attempt')
  return by.err or by[1] == asked.instance_id or (tonumber(by[2] or '') or 0) > 1
end

local function may_be_wanted(member)
  local key = key_of(member)
  return (not asked.states or may_be_in(key)) and (not asked.instance_id or may_be_by(key))
end

-- How many members at the first slot come before those that are asked for.
local function passed()
  local rank = asked.after and redis.call('ZREVRANK', index, asked.after)
  return rank and rank - redis.call('ZCOUNT', index, '(' .. asked.top, '+inf') + 1 or 0
end

local members = redis.call('ZREVRANGEBYSCORE', index, asked.top, asked.bottom, 'LIMIT', passed(),
  asked.step)
local found, looked = {}, 0
while looked < #members and #found < asked.most do
  looked = looked + 1
  if may_be_wanted(members[looked]) then
    found[#found + 1] = members[looked]
  end
end
return cjson.encode({
  found = found, looked = looked, last = members[looked],
  more = looked < #members or #members == asked.step,
})
