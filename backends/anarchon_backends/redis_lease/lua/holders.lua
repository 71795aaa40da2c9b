-- Instances, and which definitions they hold of jobs (S28).

-- Instances ---------------------------------------------------------------------------------

local instances_read

-- By incarnation: label, seen_at, lease_ms, registered, record.
local function instances()
  if instances_read then
    return instances_read
  end
  instances_read = {}
  local all = redis.call('HGETALL', NS .. ':instances')
  for i = 1, #all, 2 do
    local fine, instance = pcall(cjson.decode, all[i + 1])
    if fine and type(instance) == 'table' and type(instance.seen_at) == 'number'
      and type(instance.lease_ms) == 'number' then
      instances_read[all[i]] = instance
    end
  end
  return instances_read
end

local function is_live(instance)
  return NOW - instance.seen_at <= instance.lease_ms
end

local function live_instances()
  local live = {}
  for incarnation, instance in pairs(instances()) do
    if is_live(instance) then
      live[#live + 1] = incarnation
    end
  end
  return live
end

local function put_instance(given, registered)
  local known = instances()[given.incarnation]
  registered = registered or (known ~= nil and known.registered == true)
  local instance = {
    label = given.label, seen_at = NOW, lease_ms = given.lease_ms,
    registered = registered, record = given.record,
  }
  redis.call('HSET', NS .. ':instances', given.incarnation, cjson.encode(instance))
  instances()[given.incarnation] = instance
end

-- A heartbeat's last word: whether the instance is known, and who else has its label (S32).
local function say_alive(given, leaving)
  local before, twins = instances()[given.incarnation], {}
  for incarnation, other in pairs(instances()) do
    if other.label == given.label and incarnation ~= given.incarnation and is_live(other) then
      twins[#twins + 1] = incarnation
    end
  end
  if not leaving then
    put_instance(given, false)
  end
  return before ~= nil and before.registered == true, twins
end

-- Definitions held --------------------------------------------------------------------------

-- Which instances live is asked of the namespace first, and comes with the batch.
local LIVE = {}
for _, incarnation in ipairs(batch.live or {}) do
  LIVE[incarnation] = true
end

-- What an instance holds, as it is stored: `held`, pairs of a definition and its schedule, and when
-- it said so last (`at`).
local function hold_of(stored)
  local fine, hold = pcall(cjson.decode, stored)
  if fine and type(hold) == 'table' and type(hold.held) == 'table' and type(hold.at) == 'number' then
    return hold
  end
  return { held = {}, at = 0 }
end

-- What live instances hold of a job: a list of {definition_id, schedule_id, by = incarnation}; the
-- definitions that anybody holds; and, as it is stored, what `own` holds.
local function holds(key, own)
  local live, ever, stored = {}, {}, nil
  local all = read(key .. ':holds', 'HGETALL', key .. ':holds')
  for i = 1, #all, 2 do
    local incarnation = all[i]
    if incarnation == own then
      stored = all[i + 1]
    end
    for _, pair in ipairs(hold_of(all[i + 1]).held) do
      ever[pair[1]] = true
      if LIVE[incarnation] then
        live[#live + 1] = { pair[1], pair[2], by = incarnation }
      end
    end
  end
  return live, ever, stored
end

local function differ(live)
  for _, hold in ipairs(live) do
    if hold[1] ~= live[1][1] then
      return true
    end
  end
  return false
end

-- Notes on each definition of one job that the instance held it until `at`, and drops its hold.
-- One that it renewed after `until` stays: the instance has come back meanwhile.
local function let_go_of(key, incarnation, at, until_)
  local stored = redis.call('HGET', key .. ':holds', incarnation)
  local hold = stored and hold_of(stored)
  if not hold or (until_ and hold.at > until_) then
    return
  end
  for _, pair in ipairs(hold.held) do
    local field = pair[1] .. ':held_at'
    local before = redis.call('HGET', key .. ':definitions', field)
    if before and tonumber(before) < at then
      redis.call('HSET', key .. ':definitions', field, text(at))
    end
  end
  redis.call('HDEL', key .. ':holds', incarnation)
end

-- One command for every hundred of many members.
local function for_all(members, act)
  for first = 1, #members, 100 do
    act(unpack(members, first, math.min(first + 99, #members)))
  end
end

