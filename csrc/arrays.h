// Tensors of PyTorch as arguments: where their memory is, and their type, shape and strides. The binding reads them from
// the tensor itself, in a tenth of the time of DLPack. An array is valid as long as its tensor; the caller keeps that.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace longdraft {

enum class Type { FLOAT32, BFLOAT16, FLOAT16, INT64, INT32, INT8, UINT8, OTHER };  // OTHER: also of a tensor without memory

inline const char* name_of(Type type) {
    static const char* const NAMES[] = {"float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8",
                                        "another type or device"};
    return NAMES[static_cast<int>(type)];
}

inline long size_of(Type type) {
    static const long SIZES[] = {4, 2, 2, 8, 4, 1, 1, 1};
    return SIZES[static_cast<int>(type)];
}

// The type of activations.
inline Type rows_type(bool bf16) { return bf16 ? Type::BFLOAT16 : Type::FLOAT32; }

struct Array {
    static constexpr long MAX_AXES = 5;

    char* data = nullptr;
    Type type = Type::OTHER;
    bool is_given = false;  // false: Python passed None
    bool is_contiguous = false;
    long axes = 0;
    std::array<long, MAX_AXES> shape{}, stride{};

    explicit operator bool() const { return is_given; }

    bool has_shape(std::initializer_list<long> wanted) const {
        if (static_cast<long>(wanted.size()) != axes) return false;
        long axis = 0;
        for (long size : wanted)
            if (shape[axis++] != size) return false;
        return true;
    }

    long size() const {
        long count = 1;
        for (long axis = 0; axis < axes; axis++) count *= shape[axis];
        return count;
    }

    // The part of a contiguous array with this index on its first axis.
    Array part(long index) const {
        Array one = *this;
        one.axes = axes - 1;
        one.data = data + index * stride[0] * size_of(type);
        for (long axis = 0; axis < one.axes; axis++) one.shape[axis] = shape[axis + 1], one.stride[axis] = stride[axis + 1];
        return one;
    }
};

// One array for each layer; Python may pass one whose first axis are the layers. None: there are none.
struct LayerArrays {
    std::vector<Array> each;
};

[[noreturn]] inline void refuse(const std::string& wanted) { throw std::invalid_argument("CPU kernels want " + wanted); }

[[noreturn]] inline void refuse(const char* name, Type type, std::initializer_list<long> wanted, const Array& got) {
    std::string text = std::string(name) + " [";
    for (long size : wanted) text += std::to_string(size) + ", ";
    text += std::string("] of ") + name_of(type) + ", contiguous, got [";
    for (long axis = 0; axis < got.axes; axis++) text += std::to_string(got.shape[axis]) + ", ";
    refuse(text + "] of " + name_of(got.type) + (got.is_contiguous ? "" : ", not contiguous"));
}

// The memory of a contiguous array. ValueError in Python for another shape or type.
template <class T = void> T* memory(const char* name, const Array& x, Type type, std::initializer_list<long> shape) {
    if (!x || x.type != type || !x.is_contiguous || !x.has_shape(shape)) refuse(name, type, shape, x);
    return reinterpret_cast<T*>(x.data);
}

// The same, or null for None.
template <class T = void> T* optional_memory(const char* name, const Array& x, Type type, std::initializer_list<long> shape) {
    return x ? memory<T>(name, x, type, shape) : nullptr;
}

}  // namespace longdraft

NAMESPACE_BEGIN(NB_NAMESPACE)
NAMESPACE_BEGIN(detail)

template <> struct type_caster<longdraft::Array> {
    NB_TYPE_CASTER(longdraft::Array, const_name("torch.Tensor | None"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        value = {};
        if (source.is_none()) return true;
        try {
            return read(source);
        } catch (...) {
            PyErr_Clear();
            return false;
        }
    }

  private:
    static longdraft::Type type_of(PyObject* dtype) {
        using longdraft::Type;
        static PyObject* const known[] = {torch_type("float32"), torch_type("bfloat16"), torch_type("float16"),
                                          torch_type("int64"), torch_type("int32"), torch_type("int8"), torch_type("uint8")};
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            if (known[i] == dtype) return static_cast<Type>(i);
        return Type::OTHER;
    }

    static PyObject* torch_type(const char* name) { return object(module_::import_("torch").attr(name)).release().ptr(); }

    static PyObject* interned(const char* name) { return PyUnicode_InternFromString(name); }

    bool read(handle source) {
        static PyObject *const data_ptr = interned("data_ptr"), *const dtype = interned("dtype"), *const shape = interned("shape"),
                        *const is_contiguous = interned("is_contiguous"), *const stride = interned("stride");
        const object type = steal(PyObject_GetAttr(source.ptr(), dtype)), sizes = steal(PyObject_GetAttr(source.ptr(), shape));
        if (!type || !sizes || !PyTuple_Check(sizes.ptr())) return fail();
        const object address = steal(PyObject_CallMethodNoArgs(source.ptr(), data_ptr));
        const object whole = steal(PyObject_CallMethodNoArgs(source.ptr(), is_contiguous));
        if (!address || !whole) return fail();
        value.axes = static_cast<long>(PyTuple_GET_SIZE(sizes.ptr()));
        if (value.axes > longdraft::Array::MAX_AXES) return false;
        value.is_given = true;
        value.type = type_of(type.ptr());
        value.data = static_cast<char*>(PyLong_AsVoidPtr(address.ptr()));
        value.is_contiguous = whole.ptr() == Py_True;
        copy(sizes, value.shape);
        if (!value.data && value.size()) value.type = longdraft::Type::OTHER;
        if (value.is_contiguous) {
            long step = 1;
            for (long axis = value.axes - 1; axis >= 0; axis--) value.stride[axis] = step, step *= value.shape[axis];
        } else {
            const object strides = steal(PyObject_CallMethodNoArgs(source.ptr(), stride));
            if (!strides || !PyTuple_Check(strides.ptr())) return fail();
            copy(strides, value.stride);
        }
        return !PyErr_Occurred();
    }

    void copy(const object& tuple, std::array<long, longdraft::Array::MAX_AXES>& to) const {
        for (long axis = 0; axis < value.axes; axis++) to[axis] = PyLong_AsLong(PyTuple_GET_ITEM(tuple.ptr(), axis));
    }

    static bool fail() {
        PyErr_Clear();
        return false;
    }
};

template <> struct type_caster<longdraft::LayerArrays> {
    NB_TYPE_CASTER(longdraft::LayerArrays, const_name("torch.Tensor | Sequence[torch.Tensor] | None"))

    bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
        value.each.clear();
        if (source.is_none()) return true;
        make_caster<longdraft::Array> one;
        if (PyTuple_Check(source.ptr()) || PyList_Check(source.ptr())) {
            for (handle item : source) {
                if (!one.from_python(item, flags, cleanup)) return false;
                value.each.push_back(one.value);
            }
            return true;
        }
        if (!one.from_python(source, flags, cleanup) || one.value.axes < 1 || !one.value.is_contiguous) return false;
        for (long layer = 0; layer < one.value.shape[0]; layer++) value.each.push_back(one.value.part(layer));
        return true;
    }
};

NAMESPACE_END(detail)
NAMESPACE_END(NB_NAMESPACE)
